"""Dense tables of a collection in one native call: bits, programs and errors are those of calls on single tables."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Bags, Feature, Lookup, optimizers
from jax_tt._lookup import _groups
from jax_tt._tables import table_group
from tests.conftest import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="the native module is not built")

RNG = np.random.default_rng(0)
TABLES = {
    "rowwise": jax_tt.dense_table(5003, 16, optimizer=optimizers.RowWiseAdagrad(0.1)),
    "narrow": jax_tt.dense_table(
        1009, 5, optimizer=optimizers.Adam(0.1), skip_nonfinite=True, param_dtype="bfloat16"
    ),
    "tiny": jax_tt.dense_table(3, 64, optimizer=optimizers.SGD(0.1), param_dtype="float16"),
    "plain": jax_tt.dense_table(701, 8),
    "ordered": jax_tt.OrderedTable(
        jax_tt.dense_table(60, 4, optimizer=optimizers.Adagrad(0.1)),
        jax_tt.order.IdOrder(RNG.permutation(60)),
    ),
    "train": jax_tt.tt_table(60, 8, tt_ranks=3),
}
WEIGHTED = Bags.from_ragged([[5, 700, 5], [], [1], [9, 9]], [[1.0, 2.0, -1.0], [], [0.5], [1, 1]])
BATCH = {
    "rowwise": RNG.integers(0, 5003, (4, 300)).astype(np.int32),
    "narrow": Bags.from_padded([[1, 1008, -1], [3, 3, 3], [-1, -1, -1], [7, -1, -1]]),
    "tiny": RNG.integers(0, 3, (4, 200)).astype(np.int32),
    "plain": WEIGHTED,
    "ordered": Bags.from_ragged([[], [], [59, 0, 59], [1]]),
    "train": np.array([[1], [2], [2], [1]], np.int32),
}


def collection_of(names):
    return jax_tt.Collection(
        {name: TABLES[name] for name in names},
        {name: Feature(name, combiner="mean" if name == "plain" else "sum") for name in names},
    )


def loss_of(rows):
    return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in rows.values())


def step_of(collection, lookup, donate=False):
    def step(state, weights, batch):
        def loss(trained, weights):
            given = {**batch, "plain": Bags(batch["plain"].ids, batch["plain"].offsets, weights)}
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.embed_collection(collection, arrays, given, lookup)
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
        lookup = Lookup(method="ffi", **options)
        return loss_of(jax_tt.embed_collection(collection, arrays, batch, lookup)[0])

    return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]


@pytest.fixture
def one_by_one(monkeypatch):
    """Makes every table of a call a group of its own."""
    return functools.partial(
        monkeypatch.setattr,
        _groups,
        "groups_of",
        lambda uses: tuple((None, (k,)) for k in range(len(uses))),
    )


@pytest.mark.parametrize("bounds", ["zero", "error"])
def test_bits_are_those_of_single_calls(bounds, one_by_one):
    collection = collection_of(TABLES)
    state = collection.init(jax.random.key(0))
    batch, lookup = jax.tree.map(jnp.asarray, BATCH), Lookup(bounds=bounds, method="ffi")
    lowered = step_of(collection, lookup).lower(state, WEIGHTED.weights, batch)
    # Four devices may share the rectangular batches, but not the ragged ones.
    most = 2 if jax.device_count() > 1 else 1
    for op in ("forward", "update"):
        assert 1 <= lowered.as_text().count(f"@jax_tt_dense_tables_{op}") <= most
        assert f"@jax_tt_dense_{op}" not in lowered.as_text()
    got = lowered.compile()(state, WEIGHTED.weights, batch)
    one_by_one()
    want = step_of(collection, lookup)(state, WEIGHTED.weights, batch)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.any(np.asarray(got[2]))


@pytest.mark.optimized
def test_26_tables_are_changed_in_place():
    sizes = [1000 + 10 * k for k in range(26)]
    rule = optimizers.RowWiseAdagrad(0.1)
    tables = {f"t{n}": jax_tt.dense_table(n, 16, optimizer=rule) for n in sizes}
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = collection.init(jax.random.key(0))
    batch = {f"t{n}": jnp.asarray(RNG.integers(0, n, (8, 2)).astype(np.int32)) for n in sizes}

    step = jax.jit(functools.partial(updated, collection), donate_argnums=0)
    text = step.lower(state, batch).compile().as_text()
    assert len(re.findall(r"custom_call_target=\"jax_tt", text)) == 2
    assert not re.findall(r"= f32\[\d{4}(,16)?\][^ ]* copy", text)
    places = {
        name: own[array].unsafe_buffer_pointer()
        for name, own in state.items()
        for array in ("embedding", "slot_sum_0")
        if array in own
    }
    state = step(state, batch)
    for name, place in places.items():
        own = state[name]
        assert place in {array.unsafe_buffer_pointer() for array in own.values() if array.ndim}


def test_tables_that_need_much_memory_take_turns(one_by_one):
    tables = {name: jax_tt.dense_table(5000, 2, optimizer=optimizers.SGD(0.1)) for name in "abc"}
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = collection.init(jax.random.key(0))
    # The plan of a table takes 24 bytes an id, and the tables of one turn about 32 MiB.
    batch = {
        name: jnp.asarray(RNG.integers(0, 5000, (1000, 700)).astype(np.int32)) for name in tables
    }

    got = jax.jit(functools.partial(updated, collection))(state, batch)
    one_by_one()
    want = jax.jit(functools.partial(updated, collection))(state, batch)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_updates_in_several_calls(layout, monkeypatch):
    tables = {f"t{k}": jax_tt.dense_table(9, 4, optimizer=optimizers.Adam(0.1)) for k in range(7)}
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = collection.init(jax.random.key(0))
    batch = {name: jnp.asarray(RNG.integers(0, 9, (5, 2)), jnp.int32) for name in tables}

    def step():
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.embed_collection(
                collection, arrays, batch, Lookup(method="ffi"), layout=layout
            )
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(rows))

        lowered = jax.jit(jax.grad(loss)).lower(collection.trained(state))
        calls = re.findall(r"jax_tt_dense_tables_update", lowered.as_text())
        return lowered.compile()(collection.trained(state)), len(calls)

    want, once = step()
    assert once == 1
    for name, most, expected in (("_MOST", 9, 3), ("_MOST_IDS", 1, 7)):
        with monkeypatch.context() as patch:
            patch.setattr(table_group, name, most)
            got, several = step()
        assert several == expected
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got["updates"]["step"].tolist() == [1] * 7


def test_wrong_offsets_of_one_table_are_an_error_that_names_it():
    collection = collection_of(["plain", "ordered"])
    state = collection.init(jax.random.key(0))
    ids = jnp.array([1, 2, 3], jnp.int32)
    bad = Bags(ids, jnp.array([0, 5, 1], jnp.int32))
    batch = {"plain": bad, "ordered": Bags(ids, jnp.array([0, 1, 3], jnp.int32))}
    with pytest.raises(Exception, match=r"table 'plain.*Bags.offsets"):
        rows, _ = jax_tt.embed_collection(collection, state, batch, Lookup(method="ffi"))
        jax.block_until_ready(rows)


def test_a_bad_id_in_one_table_is_an_error_that_names_it():
    collection = collection_of(["rowwise", "plain", "tiny"])
    state = collection.init(jax.random.key(0))
    batch = {name: BATCH[name] for name in collection.tables}
    batch["tiny"] = np.array([[0, 3]], np.int32)
    with pytest.raises(Exception, match=r"tiny.*3"):
        rows, _ = jax_tt.embed_collection(collection, state, batch, Lookup(method="ffi"))
        jax.block_until_ready(rows)


def test_a_gradient_that_is_not_finite_skips_its_own_table():
    collection = collection_of(["rowwise", "narrow"])
    state = collection.init(jax.random.key(0))
    batch = {"rowwise": jnp.asarray(BATCH["rowwise"][:2, :3]), "narrow": jnp.array([[1], [2]])}

    @jax.jit
    def step(state, scale):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.embed_collection(collection, arrays, batch, Lookup(method="ffi"))
            return jnp.sum(rows["rowwise"]) + scale * jnp.sum(rows["narrow"].astype(jnp.float32))

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    after = step(state, jnp.float32(np.inf))
    np.testing.assert_array_equal(after["narrow"]["embedding"], state["narrow"]["embedding"])
    assert collection.sharing == ("rowwise", "narrow")
    assert after["updates"]["step"].tolist() == [1, 0]
    assert np.any(after["rowwise"]["embedding"] != state["rowwise"]["embedding"])


def test_a_sharded_batch_of_rectangles(one_by_one):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    collection = collection_of(["rowwise", "tiny"])
    state = collection.init(jax.random.key(0))
    batch = {name: BATCH[name] for name in collection.tables}
    mesh = Mesh(np.asarray(jax.devices()[:4]), "x")
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))

    step = functools.partial(updated, collection, bounds="zero")
    placed = jax.device_put(state, whole), jax.device_put(batch, split)
    compiled = jax.jit(step).lower(*placed).compile()
    assert "jax_tt_dense_tables_update" in compiled.as_text()
    got = compiled(*placed)
    one_by_one()
    want = jax.jit(functools.partial(step))(state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=1e-3, atol=1e-5)
