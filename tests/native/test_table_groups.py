"""Tables of a collection in one native call: bits, programs and errors are those of calls on single tables."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Bags, Feature, Lookup, optimizers
from jax_tt._lookup import shared
from jax_tt._native import table_group
from tests.conftest import native_available
from tests.fuzz import calls

pytestmark = pytest.mark.skipif(not native_available(), reason="the native module is not built")

RNG = np.random.default_rng(0)
TABLES = {
    "rowwise": jax_tt.dense_table(5003, 16, optimizer=optimizers.RowWiseAdagrad(0.1)),
    "narrow": jax_tt.dense_table(
        1009, 5, optimizer=optimizers.Adam(0.1), skip_nonfinite=True, param_dtype="bfloat16"
    ),
    "tiny": jax_tt.dense_table(3, 64, optimizer=optimizers.SGD(0.1), param_dtype="float16"),
    "plain": jax_tt.dense_table(701, 8),
    "ordered": jax_tt.tables.OrderedTable(
        jax_tt.dense_table(60, 4, optimizer=optimizers.Adagrad(0.1)),
        jax_tt.order.IdOrder(RNG.permutation(60)),
    ),
    "train": jax_tt.tt_table(60, 8, tt_ranks=3),
    "chain": jax_tt.tt_table(100_003, 12, tt_ranks=7, optimizer=optimizers.RowWiseAdagrad(0.1)),
    "links": jax_tt.tt_table(
        2001,
        8,
        tt_ranks=(3, 5),
        optimizer=optimizers.Adam(0.1),
        param_dtype="bfloat16",
        skip_nonfinite=True,
    ),
    "short": jax_tt.tt_table(
        70,
        6,
        tt_ranks=4,
        row_factors=(7, 10),
        col_factors=(2, 3),
        optimizer=optimizers.Adagrad(0.1),
        id_order=jax_tt.order.IdOrder(RNG.permutation(70)),
    ),
    "free": jax_tt.tt_table(500, 4, tt_ranks=2),
}
WEIGHTED = Bags.from_ragged([[5, 700, 5], [], [1], [9, 9]], [[1.0, 2.0, -1.0], [], [0.5], [1, 1]])
BATCH = {
    "rowwise": RNG.integers(0, 5003, (4, 300)).astype(np.int32),
    "narrow": Bags.from_padded([[1, 1008, -1], [3, 3, 3], [-1, -1, -1], [7, -1, -1]]),
    "tiny": RNG.integers(0, 3, (4, 200)).astype(np.int32),
    "plain": WEIGHTED,
    "ordered": Bags.from_ragged([[], [], [59, 0, 59], [1]]),
    "train": np.array([[1], [2], [2], [1]], np.int32),
    "chain": Bags.from_lengths(RNG.integers(0, 100_003, 90).astype(np.int32), [0, 50, 39, 1]),
    "links": Bags.from_ragged([[7, 7, 2000], [], [0], [7]]),
    "short": Bags.from_ragged([[69], [0, 69], [], [3, 4, 5]]),
    "free": Bags.from_ragged([[1, 1], [2], [], [499]], [[0.5, 1.0], [-1.0], [], [2.0]]),
}


def collection_of(names):
    return jax_tt.Collection(
        {name: TABLES[name] for name in names},
        {name: Feature(name, combiner="mean" if name == "plain" else "sum") for name in names},
    )


def initial(collection):
    return jax.jit(collection.init)(jax.random.key(0))


def loss_of(rows):
    return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in rows.values())


def step_of(collection, lookup, donate=False):
    def step(state, weights, batch):
        def loss(trained, weights):
            given = {**batch, "plain": Bags(batch["plain"].ids, batch["plain"].offsets, weights)}
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, given, lookup)
            return loss_of(rows), rows

        grad = jax.grad(loss, (0, 1), has_aux=True)
        (trained, dweights), rows = grad(collection.trained(state), weights)
        state, others = collection.overwritten(state, trained)
        return state, others, dweights, rows

    return jax.jit(step, donate_argnums=0 if donate else ())


def updated(collection, state, batch, **options):
    """The state after a step, with batches without weights."""

    def loss(trained):
        arrays = collection.replaced(state, trained)
        lookup = Lookup(method="native", **options)
        return loss_of(jax_tt.lookup_features(collection, arrays, batch, lookup)[0])

    return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]


CALLS = ("dense_forward", "forward", "dense_update", "update")


def count_calls(lowered, op):
    return lowered.as_text().count(f"@jax_tt_{op}_v1")


@pytest.mark.slow(but="error")
@pytest.mark.parametrize("bounds", ["zero", "error"])
def test_bits_are_those_of_single_calls(bounds, one_by_one):
    collection = collection_of(TABLES)
    state = initial(collection)
    batch, lookup = jax.tree.map(jnp.asarray, BATCH), Lookup(bounds=bounds, method="native")
    lowered = step_of(collection, lookup).lower(state, WEIGHTED.weights, batch)
    # Several devices share the rectangular batches, but not the ragged ones: each form is a call.
    forms = 2 if jax.device_count() > 1 else 1
    assert {op: count_calls(lowered, op) for op in CALLS} == {
        "dense_forward": forms,
        "forward": forms,
        "dense_update": forms,
        "update": 1,
    }
    got = lowered.compile()(state, WEIGHTED.weights, batch)
    one_by_one()
    want = step_of(collection, lookup)(state, WEIGHTED.weights, batch)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.any(np.asarray(got[2]))


def all_bits(collection, state, batch, lookup):
    """Rows, new states and gradients of a step."""

    @jax.jit
    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, lookup)
            return loss_of(rows), rows

        return jax.grad(loss, has_aux=True)(collection.trained(state))

    return step(state, batch)


@pytest.mark.parametrize(
    ("form", "bounds"),
    [("int64", "zero"), ("empty", "error"), ("split", "clip")],
)
def test_bits_of_tensor_trains(form, bounds, one_by_one, x64):
    """Also out of range, without ids, and beside a table in float64."""
    names = ("links", "free")
    tables = {name: TABLES[name] for name in names}
    tables["double"] = jax_tt.tt_table(
        60, 3, tt_ranks=3, optimizer=optimizers.SGD(0.1), param_dtype="float64"
    )
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = initial(collection)
    ids = np.array([0, 59, -1, 59, 60, 100_003, 7], np.int64 if form == "int64" else np.int32)
    bags = Bags(ids, np.array([0, 2, 2, 6, 7], np.int32))
    if form == "int64":
        ids[4] = 2**40 + 3
    if form == "empty":
        bags = Bags(np.zeros(0, np.int32), np.zeros(1, np.int32))
    batch = dict.fromkeys(tables, bags)
    if form == "split":
        split = tables["double"].shape.split_ids(np.array([7, 59, 7]))
        batch["double"] = Bags(split, np.array([0, 1, 1, 1, 3], np.int32))
    lookup = Lookup(bounds=bounds, method="native")
    got = all_bits(collection, state, batch, lookup)
    one_by_one()
    jax.tree.map(np.testing.assert_array_equal, got, all_bits(collection, state, batch, lookup))


def test_plans_of_tensor_trains_that_nothing_needs_are_not_kept():
    collection = collection_of(["chain", "free"])
    state = initial(collection)
    batch = {name: BATCH[name] for name in collection.tables}

    def look_up(state):
        return jax_tt.lookup_features(collection, state, batch, method="native")[0]

    text = jax.jit(look_up).lower(state).as_text()
    (results,) = re.findall(r"@jax_tt_forward.* -> \((.*)\)", text)
    assert re.findall(r"tensor<(\S+)xi32>", results) == ["1x0", "1x0"]


def test_tensor_trains_are_mapped_and_recomputed(one_by_one):
    """By `jax.vmap` over batches, and by `jax.checkpoint`."""
    tables = {name: jax_tt.tt_table(70, 4, tt_ranks=2) for name in "ab"}
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = initial(collection)
    batch = {name: jnp.asarray(RNG.integers(0, 70, (3, 11, 2)), jnp.int32) for name in tables}

    def gradients():
        @jax.jit
        @functools.partial(jax.vmap, in_axes=(None, 0))
        def step(trained, batch):
            @jax.checkpoint
            def loss(trained):
                lookup = Lookup(method="native")
                return loss_of(jax_tt.lookup_features(collection, trained, batch, lookup)[0])

            return jax.grad(loss)(trained)

        return step(state, batch)

    got = gradients()
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got))
    one_by_one()
    jax.tree.map(np.testing.assert_array_equal, got, gradients())


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("kind", "count"), [pytest.param("dense", 26, marks=pytest.mark.slow), ("tt", 7)]
)
def test_tables_are_changed_in_place(kind, count):
    sizes = [1000 + 10 * k for k in range(count)]
    rule = optimizers.RowWiseAdagrad(0.1)
    make = {"dense": jax_tt.dense_table, "tt": functools.partial(jax_tt.tt_table, tt_ranks=9)}[kind]
    tables = {f"t{n}": make(n, 16, optimizer=rule) for n in sizes}
    features = {name: Feature(name) for name in tables}
    collection = jax_tt.Collection(tables, features, stack=False)
    state = initial(collection)
    batch = {f"t{n}": jnp.asarray(RNG.integers(0, n, (11, 2)).astype(np.int32)) for n in sizes}

    step = jax.jit(functools.partial(updated, collection), donate_argnums=0)
    text = step.lower(state, batch).compile().as_text()
    assert len(re.findall(r"custom_call_target=\"jax_tt", text)) == 2
    shapes = {array.shape for name in tables for array in state[name].values()}
    assert len(shapes) >= 2 * (count if kind == "dense" else 1)
    copied = re.findall(r"= f32\[([\d,]*)\][^ ]* copy", text)
    assert not shapes & {tuple(map(int, sizes.split(","))) for sizes in copied if sizes}
    places = {
        (name, array): value.unsafe_buffer_pointer()
        for name in (*tables, "updates")
        for array, value in state[name].items()
    }
    state = step(state, batch)
    for (name, array), place in places.items():
        own = {value.unsafe_buffer_pointer() for value in state[name].values()}
        assert place in own, f"{array} of {name} was copied"


def test_tables_that_need_much_memory_take_turns(one_by_one):
    tables = {name: jax_tt.dense_table(5000, 2, optimizer=optimizers.SGD(0.1)) for name in "abc"}
    features = {name: Feature(name) for name in tables}
    collection = jax_tt.Collection(tables, features, stack=False)
    state = initial(collection)
    # The plan of a table takes 24 bytes an id, and the tables of one turn about 32 MiB.
    batch = {
        name: jnp.asarray(RNG.integers(0, 5000, (1000, 700)).astype(np.int32)) for name in tables
    }

    got = jax.jit(functools.partial(updated, collection))(state, batch)
    one_by_one()
    want = jax.jit(functools.partial(updated, collection))(state, batch)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    ("kind", "layout"), [("dense", "features"), ("dense", "concatenated"), ("tt", "features")]
)
def test_updates_in_several_calls(kind, layout, monkeypatch):
    rule = optimizers.Adam(0.1)
    table = jax_tt.dense_table(9, 4, optimizer=rule)
    if kind == "tt":
        table = jax_tt.tt_table(27, 4, tt_ranks=2, optimizer=rule)
    tables = dict.fromkeys((f"t{k}" for k in range(7)), table)
    arrays = 3 * len(table.spec.param_names)
    features = {name: Feature(name) for name in tables}
    collection = jax_tt.Collection(tables, features, stack=False)
    state = initial(collection)
    batch = {name: jnp.asarray(RNG.integers(0, 9, (11, 2)), jnp.int32) for name in tables}
    call = {"dense": "dense_update", "tt": "update"}[kind]

    def step():
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(
                collection, arrays, batch, Lookup(method="native"), layout=layout
            )
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(rows))

        lowered = jax.jit(jax.grad(loss)).lower(collection.trained(state))
        return lowered.compile()(collection.trained(state)), count_calls(lowered, call)

    want, once = step()
    assert once == 1
    update = type(table).calls.update
    for where, name, most, expected in (
        (update, "most_arrays", 3 * arrays, 3),
        (table_group, "_MOST_IDS", 1, 7),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, most)
            got, several = step()
        assert several == expected
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got["updates"]["step"].tolist() == [1] * 7


@pytest.mark.parametrize(("wrong", "right"), [("plain", "ordered"), ("links", "chain")])
def test_wrong_offsets_of_one_table_are_an_error_that_names_it(wrong, right):
    collection = collection_of([wrong, right])
    state = initial(collection)
    ids = jnp.array([1, 2, 3], jnp.int32)
    bad = Bags(ids, jnp.array([0, 5, 1], jnp.int32))
    batch = {wrong: bad, right: Bags(ids, jnp.array([0, 1, 3], jnp.int32))}
    options = {"bounds": "error", "method": "native"}
    look_up = jax.jit(functools.partial(jax_tt.lookup_features, collection, **options))
    with pytest.raises(Exception, match=rf"'{wrong}': bags.offsets\[1\] is 5 after 0"):
        jax.block_until_ready(look_up(state, batch))


@pytest.mark.parametrize(
    ("names", "wrong", "ids"),
    [
        (["rowwise", "plain", "tiny"], "tiny", [[0, 3]]),
        (["chain", "links", "short", "free"], "short", [[0, 70]]),
    ],
)
def test_a_bad_id_in_one_table_is_an_error_that_names_it(names, wrong, ids):
    collection = collection_of(names)
    state = initial(collection)
    batch = {name: BATCH[name] for name in collection.tables}
    batch[wrong] = np.array(ids, np.int32)
    options = {"bounds": "error", "method": "native"}
    look_up = jax.jit(functools.partial(jax_tt.lookup_features, collection, **options))
    with pytest.raises(Exception, match=rf"{wrong}.*{ids[0][1]}"):
        jax.block_until_ready(look_up(state, batch))


@pytest.mark.parametrize(("finite", "careful"), [("rowwise", "narrow"), ("chain", "links")])
def test_a_gradient_that_is_not_finite_skips_its_own_table(finite, careful):
    collection = collection_of([finite, careful])
    state = initial(collection)
    batch = {finite: jnp.arange(33).reshape(11, 3), careful: jnp.arange(11)[:, None]}

    @jax.jit
    def step(state, scale):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, method="native")
            return jnp.sum(rows[finite]) + scale * jnp.sum(rows[careful].astype(jnp.float32))

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    after = collection.separated(step(state, jnp.float32(np.inf)))
    state = collection.separated(state)
    jax.tree.map(np.testing.assert_array_equal, after[careful], state[careful])
    assert set(collection.sharing) == {finite, careful}
    assert [float(after[name]["step"]) for name in (finite, careful)] == [1, 0]
    name = TABLES[finite].spec.param_names[0]
    assert np.any(after[finite][name] != state[finite][name])


def test_a_sharded_batch_of_rectangles(one_by_one):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    collection = collection_of(["rowwise", "tiny", "train"])
    state = initial(collection)
    batch = {name: BATCH[name] for name in collection.tables}
    mesh = Mesh(np.asarray(jax.devices()[:4]), "x")
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))

    step = functools.partial(updated, collection, bounds="zero")
    placed = jax.device_put(state, whole), jax.device_put(batch, split)
    compiled = jax.jit(step).lower(*placed).compile()
    assert "jax_tt_dense_update" in compiled.as_text()
    got = compiled(*placed)
    one_by_one()
    want = jax.jit(functools.partial(step))(state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=1e-3, atol=1e-5)


def test_tensor_trains_of_a_sharded_batch(one_by_one):
    """An id out of range in one shard keeps its table from a step on all devices, and no other."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    collection = collection_of(["chain", "links"])
    state = initial(collection)
    rows = {"chain": (100_003, 30), "links": (2001, 9)}
    batch = {n: RNG.integers(0, most, (4, length), np.int32) for n, (most, length) in rows.items()}
    given = {name: ids.copy() for name, ids in batch.items()}
    given["chain"][2, 5] = 100_003
    mesh = Mesh(np.asarray(jax.devices()[:4]), "x")
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))

    placed = jax.device_put(state, whole), jax.device_put(given, split)
    step = functools.partial(updated, collection, bounds="error")
    compiled = jax.jit(step).lower(*placed).compile()
    calls_of = re.compile('custom_call_target="jax_tt_([a-z_]*)_v1"').findall
    of_all = ["apply", "backward", "forward"]
    assert sorted(calls_of(compiled.as_text())) == of_all
    got = collection.separated(compiled(*placed))
    one_by_one()
    want = collection.separated(jax.jit(step)(state, batch))
    want["chain"] = collection.separated(state)["chain"]
    for name in collection.tables:
        for a, b in zip(*map(jax.tree.leaves, (got[name], want[name])), strict=True):
            pair = a.astype(np.float32), b.astype(np.float32)
            np.testing.assert_allclose(*pair, rtol=1e-3, atol=1e-5)
    steps = {name: float(got[name]["step"]) for name in collection.sharing}
    assert steps == {"chain": 0, "links": 1}


def test_tensor_trains_of_batches_split_over_other_axes():
    """In a `shard_map`, the gradients of each table are summed over the axes of its own batch."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    table = jax_tt.tt_table(70, 4, tt_ranks=2, optimizer=optimizers.Adagrad(0.1))
    axes = {"first": ("x",), "both": ("x", "y"), "none": ()}
    collection = jax_tt.Collection(
        dict.fromkeys(axes, table), {name: Feature(name) for name in axes}
    )
    state = initial(collection)
    batch = {name: jnp.asarray(RNG.integers(0, 70, (8, 3)), jnp.int32) for name in axes}

    def step(state, batch, axes):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, method="native")
            losses = {name: loss_of({name: out}) for name, out in rows.items()}
            return sum(
                lax.psum(own, axes[name]) if axes[name] else own for name, own in losses.items()
            )

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    specs = P(), {name: P(own) if own else P() for name, own in axes.items()}
    sharded = functools.partial(step, axes=axes)
    got = jax.jit(jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=P()))(state, batch)
    want = jax.jit(functools.partial(step, axes=dict.fromkeys(axes)))(state, batch)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_tensor_trains_without_ids_in_a_sharded_step():
    """Bags that have no room for ids beside bags that do."""
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    tables = {
        name: jax_tt.tt_table(70, 4, tt_ranks=2, optimizer=optimizers.SGD(0.1)) for name in "ab"
    }
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = initial(collection)
    batch = {"a": np.zeros((8, 0), np.int32), "b": RNG.integers(0, 70, (8, 3), np.int32)}
    step = functools.partial(updated, collection, axis_name="x")
    mesh, specs = Mesh(np.asarray(jax.devices()[:4]), "x"), (P(), P("x"))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    got = jax.jit(sharded)(state, batch)
    want = jax.jit(functools.partial(updated, collection))(state, batch)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("build", [calls.build_trains, calls.build_dense])
def test_arguments_that_do_not_fit_name_their_table(build):
    """As calls from Python never have them."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        for op in ("forward", "backward", "update"):
            call = build(rng)
            while not (call.target.endswith(f"{op}_v1") and "1" in call.attributes):
                call = build(rng)
            call.attributes["1"] |= {"table": "second", "padded": 1.5}
            message = "table 'second': attribute padded"
            with pytest.raises(jax.errors.JaxRuntimeError, match=message):
                call.run()


# --- The scalars that tables share


@pytest.mark.optimized
def test_the_step_counts_of_all_tables_are_one_kernel():
    """Compiling a kernel for every count takes as long as compiling the rest of the step."""

    def kernels(tables: int) -> int:
        names = [f"table_{k}" for k in range(tables)]
        table = jax_tt.dense_table(9, 4, optimizer=optimizers.SGD(0.1))
        collection = jax_tt.Collection(
            dict.fromkeys(names, table), {name: Feature(name) for name in names}
        )
        state = jax.eval_shape(collection.init, jax.random.key(0))
        ids = dict.fromkeys(names, jax.ShapeDtypeStruct((2, 1), jnp.int32))

        def step(state, ids):
            return jax.grad(lambda s: _total(collection, s, ids))(state)

        text = jax.jit(step, donate_argnums=0).lower(state, ids).compile().as_text()
        return len(re.findall(r"= f32\[\d*\]\S* (?:fusion|add)\(", text[text.index("ENTRY") :]))

    assert kernels(2) == kernels(6)


def _total(collection, state, ids):
    rows, _ = jax_tt.lookup_features(collection, state, ids)
    return sum(map(jnp.sum, rows.values()))


def test_step_counts_under_vmap():
    """Mapped or not, also beside others that are; those of tables without a step stay."""
    one = jnp.float32(1)

    def after(steps, *applied):
        flags = {"sentinel": one, "used": one}
        return shared.Shared(steps, **flags).after(dict(enumerate(applied))).steps

    steps, mapped, single = jnp.array([0.0, 5.0, 5.0]), jnp.arange(3.0), jnp.float32(2)
    got = jax.vmap(after, (None, 0, None))(steps, mapped, single)
    np.testing.assert_array_equal(got, [[0, 7, 5], [1, 7, 5], [2, 7, 5]])
    got = jax.vmap(after, (0, None, 0))(jnp.stack([steps, steps + 1, steps + 2]), single, mapped)
    np.testing.assert_array_equal(got, [[2, 5, 5], [3, 7, 6], [4, 9, 7]])
    got = jax.vmap(lambda k: (k, after(steps, single, single)), out_axes=(0, None))(mapped)
    np.testing.assert_array_equal(got[1], [2, 7, 5])
    assert after(jnp.full(70, 5.0), *[jnp.float32(5)] * 70).tolist() == [10.0] * 70


def test_tensor_trains_of_each_part_of_a_mesh():
    """Each device has tables of its own, and JAX knows that their new values differ."""
    tables = {
        name: jax_tt.tt_table(70, 4, tt_ranks=2, optimizer=optimizers.SGD(0.1)) for name in "ab"
    }
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    count = 2
    keys = jax.random.split(jax.random.key(0), count)
    states = jax.vmap(collection.init)(keys)
    batch = {name: jnp.asarray(RNG.integers(0, 70, (count, 8, 3)), jnp.int32) for name in tables}

    def of_part(*args):
        state = updated(collection, *jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], state)

    mesh = Mesh(np.asarray(jax.devices()[:count]), "x")
    sharded = jax.shard_map(of_part, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    got = jax.jit(sharded)(states, batch)
    for k in range(count):
        own, state, own_batch = jax.tree.map(lambda leaf, k=k: leaf[k], (got, states, batch))
        want = updated(collection, state, own_batch)
        for a, b in zip(*map(jax.tree.leaves, (own, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
