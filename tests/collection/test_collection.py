"""Collections: all features in one call give what the tables give one by one, bit for bit."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Bags, Feature, KeyedBags, Lookup, optimizers
from tests.conftest import method_fixture, native_available
from tests.helpers import assert_close as assert_relative
from tests.helpers import bag_model, core_gradients, dense_table, f64

# What is specific to a collection is done before the ops: one native implementation is enough.
method = method_fixture("reference", "native")

RNG = np.random.default_rng(0)
ORDER = jax_tt.order.IdOrder(RNG.permutation(60))
# Two cores: the reference of three takes twice as long to trace.
TWO_CORES = {"tt_ranks": 3, "row_factors": (8, 8)}
CACHED = TWO_CORES | {"optimizer": optimizers.Adagrad(0.1), "cache": jax_tt.RowCache(8, ways=4)}
TABLES = {
    "dense": jax_tt.dense_table(50, 6, optimizer=optimizers.RowWiseAdagrad(0.1)),
    "train": jax_tt.tt_table(60, 8, **TWO_CORES),
    "cached": jax_tt.tt_table(60, 8, **CACHED),
    "ordered": jax_tt.tt_table(60, 4, **TWO_CORES, optimizer=optimizers.Adam(0.1), id_order=ORDER),
    "plain": jax_tt.dense_table(40, 6),
}
MIXED = jax_tt.Collection(
    TABLES,
    {
        "weighted": Feature("dense", combiner="mean"),
        "rectangle": Feature("train"),
        "padded": Feature("cached", combiner="sqrtn"),
        "sequence": Feature("ordered", combiner=None),
        "largest": Feature("plain", combiner="max"),
    },
)
BATCH = {
    "weighted": Bags.from_ragged([[1, 2, 1], [], [49]], [[1.0, 2.0, 0.5], [], [3.0]]),
    "rectangle": RNG.integers(0, 60, (4, 3)).astype(np.int32),
    "padded": Bags.from_padded([[1, 2, -1], [3, 3, 59]]),
    "sequence": np.array([[3, 4], [5, 3]], np.int32),
    "largest": Bags.from_ragged([[1, 39], [5], []]),
}


ZERO = Lookup(bounds="zero")


def loss_of(rows: Any) -> jax.Array:
    return sum(jnp.sum(jnp.sin(rows[name]) * (k + 1)) for k, name in enumerate(sorted(rows)))


@functools.partial(jax.jit, static_argnums=(0, 4))
@functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
def step(collection: Any, trained: Any, state: Any, batch: Any, lookup: Lookup) -> Any:
    """The loss of a collection, its rows and state, and the cotangents of the trained arrays."""
    arrays = collection.replaced(state, trained)
    rows, after = jax_tt.lookup_features(collection, arrays, batch, lookup)
    return loss_of(rows), (rows, after)


@functools.partial(jax.jit, static_argnums=(0, 4))
@functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
def one_by_one(collection: Any, trained: Any, state: Any, batch: Any, lookup: Lookup) -> Any:
    """`step` with one call per feature, of tables on their own."""
    rows, after = {}, {}
    for name, feature in collection.features.items():
        table = collection.separated_tables[feature.table]
        own = {**state[feature.table], **trained[feature.table]}
        if feature.combiner is None:
            found = jax_tt.lookup(table, own, batch[name], lookup)
        else:
            options = Lookup(feature.combiner, lookup.bounds, method=lookup.method)
            found = jax_tt.lookup_bags(table, own, batch[name], options)
        rows[name], after[feature.table] = found
    return loss_of(rows), (rows, after)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)


@pytest.fixture(scope="module")
def mixed() -> Any:
    return jax.jit(MIXED.init)(jax.random.key(0))


def test_a_mixed_collection_equals_its_tables(mixed, method):
    """Rows, counts of the cache, gradients and fused updates."""
    # The reference of a train takes long to trace: one of them is enough, on which nothing here depends.
    names = ("dense", "ordered", "plain") if method == "reference" else tuple(TABLES)
    features = {name: own for name, own in MIXED.features.items() if own.table in names}
    collection = jax_tt.Collection({name: TABLES[name] for name in names}, features)
    batch, lookup = {name: BATCH[name] for name in features}, Lookup(bounds="zero", method=method)
    alone = {name: own for name, own in MIXED.separated(mixed).items() if name in names}
    state = collection.joined(alone)
    (loss, (rows, after)), gradients = step(
        collection, collection.trained(state), state, batch, lookup
    )
    tables = collection.separated_tables
    own = {name: {k: alone[name][k] for k in tables[name].spec.trained_names} for name in names}
    want = one_by_one(collection, own, alone, batch, lookup)
    got = (loss, (rows, collection.separated(after))), collection.separated(gradients)
    assert_same(got, want)
    new, others = collection.overwritten(after, gradients)
    assert sorted(others) == [name for name in ("plain", "train") if name in names]
    assert set(new["updates"]["step"].tolist()) == {1}
    if "cached" in names:
        assert float(new["cached"]["step"]) == 1
        assert int(collection.maintain(new)["cached"]["cache_clock"]) == 1


def test_tables_that_a_loss_does_not_use_stay(mixed):
    @jax.jit
    @jax.grad
    def part(trained):
        arrays = MIXED.replaced(mixed, trained)
        return jnp.sum(jax_tt.lookup_features(MIXED, arrays, BATCH, ZERO)[0]["weighted"])

    gradients = part(MIXED.trained(mixed))
    used = {name: float(own["used"]) for name, own in gradients.items() if "used" in own}
    assert used == {"updates": 1, "cached": 0}
    assert gradients["updates"]["step"].tolist() == [1, 0]
    new, _ = MIXED.overwritten(mixed, gradients)
    for name in ("cached", "ordered"):
        assert_same(new[name], mixed[name])
    assert not np.array_equal(new["dense"]["embedding"], mixed["dense"]["embedding"])


def test_one_rule_for_all_tables(mixed):
    def rows(trained, batch):
        arrays = MIXED.replaced(mixed, trained)
        return jax_tt.lookup_features(MIXED, arrays, batch, method="reference")[0]

    # JAX differentiates tables without an optimizer itself in the reference; one rule covers the others.
    text = str(jax.make_jaxpr(rows)(MIXED.trained(mixed), BATCH))
    assert text.count("custom_vjp_call[") == 1


# Features of every form, with numbers of bags of their own, that share a table; and the ids and weights of their bags.
FORMS = {
    "ragged": Bags.from_ragged([[3, 1, 3], [], [29]], [[0.5, 1.0, 2.0], [], [1.5]], capacity=7),
    "rectangle": np.array([[1, 2], [3, 3]], np.int32),
    "empty": Bags.from_ragged([]),
    "counted": Bags.from_ragged([[4, 4, 0], [1]]),
    "padded": Bags.from_padded([[5, -1], [-1, -1], [6, 1]]),
    "largest": Bags.from_ragged([[3, 7], [], [0]], capacity=4),
    "rows": np.array([[0, 3, 2]], np.int32),
    "positions": Bags.from_ragged([[8], [9, 3]], capacity=5),
}
CONTENTS: dict[str, tuple[list[list[int]], Any]] = {
    "ragged": ([[3, 1, 3], [], [29]], [[0.5, 1.0, 2.0], [], [1.5]]),
    "rectangle": ([[1, 2], [3, 3]], None),
    "empty": ([], None),
    "counted": ([[4, 4, 0], [1]], None),
    "padded": ([[5], [], [6, 1]], None),
    "largest": ([[3, 7], [], [0]], None),
    "rows": ([[0], [3], [2]], None),
    "positions": ([[8], [9], [3]], None),
}
COMBINERS = {"counted": "mean", "padded": "mean", "largest": "max", "rows": None, "positions": None}


def sharing(table: Any, names: Any = tuple(FORMS)) -> jax_tt.Collection:
    features = {name: Feature("one", combiner=COMBINERS.get(name, "sum")) for name in names}
    return jax_tt.Collection({"one": table}, features)


@pytest.mark.parametrize("kind", ["dense", "train"])
def test_features_of_every_form_share_a_table(kind, method):
    """Each of them reads what numpy says, and their gradients add up."""
    table = {"dense": jax_tt.dense_table(30, 4), "train": jax_tt.tt_table(30, 4, tt_ranks=3)}[kind]
    collection = sharing(table)
    state, lookup = collection.init(jax.random.key(1)), Lookup(bounds="zero", method=method)
    (_, (rows, _)), gradients = step(collection, state, state, FORMS, lookup)
    params = tuple(state["one"][name] for name in table.spec.param_names)
    dense = f64(params[0]) if kind == "dense" else dense_table(params, 30)
    total = np.zeros_like(dense)
    for name, (ids, weights) in CONTENTS.items():
        combiner, factor = COMBINERS.get(name) or "sum", sorted(FORMS).index(name) + 1.0
        pooled, _, _ = bag_model(dense, ids, weights, combiner, np.zeros((len(ids), 4)))
        assert_relative(rows[name].reshape(-1, 4)[: len(ids)], pooled, 1e-5, name)
        total += bag_model(dense, ids, weights, combiner, factor * np.cos(pooled))[1]
    want = [total] if kind == "dense" else core_gradients(params, total)
    for name, gradient in zip(table.spec.param_names, want, strict=True):
        assert_relative(gradients["one"][name], gradient, 1e-5, name)
    assert rows["empty"].shape == (0, 4) and rows["positions"].shape == (5, 4)
    assert rows["rows"].shape == (1, 3, 4) and not np.any(rows["positions"][3:])


def test_features_that_share_a_fused_table_are_one_batch(method):
    """The table is used once in the loss, and duplicates across features are summed before the one update."""
    names = ("ragged", "rectangle", "empty")
    collection = sharing(jax_tt.dense_table(30, 4, optimizer=optimizers.Adam(0.1)), names)
    state, lookup = collection.init(jax.random.key(1)), Lookup(method=method)
    parts = [FORMS["ragged"], Bags(FORMS["rectangle"]), FORMS["empty"]]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def by_hand(trained):
        pooled, _ = jax_tt.lookup_bags(
            collection.separated_tables["one"], trained, Bags.concatenate(parts), lookup
        )
        rows = dict(zip(names, Bags.split(pooled, parts), strict=True))
        return loss_of(rows), rows

    (_, (rows, _)), gradients = step(collection, state, state, {n: FORMS[n] for n in names}, lookup)
    gradient = collection.separated(gradients)["one"]
    assert_same((gradient, rows), by_hand(collection.separated(state)["one"]))
    assert float(gradient["step"]) == float(gradient["sentinel"]) == 1


TWO = jax_tt.Collection(
    {"one": jax_tt.dense_table(30, 4)}, {"a": Feature("one"), "b": Feature("one")}
)


def test_rectangles_that_share_a_table(method):
    first, second = np.array([[1, 2], [3, 3]], np.int32), np.array([[4, 1], [-1, 0]], np.int32)
    ones = jnp.array([[0.5, 1.0], [2.0, 3.0]])
    state, lookup = TWO.init(jax.random.key(1)), Lookup(bounds="clip", method=method)
    for batch in (
        {"a": first, "b": second},
        {"a": Bags(first, weights=ones), "b": second},
        {"a": np.where(first == 2, np.int32(-1), first), "b": Bags.from_padded(second)},
    ):
        (_, (rows, _)), _ = step(TWO, state, state, batch, lookup)
        for name, bags in batch.items():
            want = jax_tt.functional.embed_bag(
                state["one"]["embedding"], bags, bounds="clip", method=method
            )
            assert_same(rows[name], want)


def test_ids_of_two_widths_share_a_table(x64):
    batch = {"a": np.array([[1, 2]], np.int32), "b": np.array([[2**40, 3]])}
    state = TWO.init(jax.random.key(1))
    (_, (rows, _)), _ = step(TWO, state, state, batch, ZERO)
    table = np.asarray(state["one"]["embedding"])
    assert_same(rows["a"][0], table[1] + table[2])
    assert_same(rows["b"][0], table[3])


KEYED = ("ragged", "largest", "rectangle", "empty", "positions")


@pytest.mark.parametrize("neighbours", [True, False])
def test_keyed_bags_equal_a_dict(neighbours):
    """Also where features that share a table do not lie side by side."""
    collection = jax_tt.Collection(
        {
            "one": jax_tt.dense_table(30, 4, optimizer=optimizers.Adagrad(0.1)),
            "two": jax_tt.dense_table(30, 3),
        },
        {
            "ragged": Feature("one"),
            "rectangle": Feature("one", combiner="mean_count"),
            "largest": Feature("two", combiner="max"),
            "empty": Feature("two"),
            "positions": Feature("two", combiner=None),
        },
    )
    order = sorted(KEYED, key=list(collection.features).index) if neighbours else KEYED
    batch = {name: FORMS[name] for name in order}
    keyed = KeyedBags.from_bags(batch, capacity=20)
    state, lookup = collection.init(jax.random.key(1)), Lookup()
    trained = collection.trained(state)
    (_, (got, _)), new = step(collection, trained, state, keyed, lookup)
    (_, (want, _)), want_new = step(collection, trained, state, batch, lookup)
    count = FORMS["positions"].offsets[-1]
    assert got["positions"].shape == (20, 3) and not np.any(got["positions"][count:])
    assert_same(got.pop("positions")[:count], want.pop("positions")[:count])
    assert_same(got, want)
    assert_close(new, want_new)


@pytest.mark.optimized
def test_tables_are_updated_in_place():
    if not native_available():
        pytest.skip("the reference updates no table in place")
    tables = {
        name: jax_tt.dense_table(5003, 16, optimizer=optimizers.Adagrad(0.1)) for name in "abc"
    }
    features = {name: Feature(name) for name in "abc"} | {"again": Feature("a")}
    collection = jax_tt.Collection(tables, features, stack=False)
    state = jax.jit(collection.init)(jax.random.key(0))
    batch = {name: jnp.array([[1, 2], [2, 5002]], jnp.int32) for name in features}

    def train(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, after = jax_tt.lookup_features(collection, arrays, batch)
            return loss_of(rows), after

        gradients, after = jax.grad(loss, has_aux=True)(collection.trained(state))
        return collection.overwritten(after, gradients)[0]

    compiled = jax.jit(train, donate_argnums=0).lower(state, batch).compile()
    places = [state[name]["embedding"].unsafe_buffer_pointer() for name in "abc"]
    for _ in range(2):
        state = compiled(state, batch)
    assert [state[name]["embedding"].unsafe_buffer_pointer() for name in "abc"] == places
    assert not re.findall(r"= f32\[5003,16\][^ ]* copy[^ ]*\(", compiled.as_text())


@pytest.mark.parametrize("way", ["shard_map", "jit", "explicit"])
def test_a_batch_over_devices(way):
    """Also where features that share a table are sharded one by one, and their joined batch cannot be."""
    if not native_available():
        pytest.skip("no native module")
    collection = jax_tt.Collection(
        {
            "one": jax_tt.dense_table(30, 4, optimizer=optimizers.Adagrad(0.1)),
            "two": jax_tt.tt_table(30, 4, tt_ranks=3),
        },
        {
            "a": Feature("one"),
            "b": Feature("one", combiner="mean"),
            "c": Feature("two"),
            "d": Feature("two", combiner=None),
        },
    )
    state = collection.init(jax.random.key(0))
    batch = {name: RNG.integers(0, 30, (8, 2 + (name == "b"))) for name in collection.features}
    batch = jax.tree.map(lambda ids: ids.astype(np.int32), batch)

    def gradients(trained, batch):
        def loss(trained):
            arrays, lookup = collection.replaced(state, trained), Lookup(bounds="zero")
            return loss_of(jax_tt.lookup_features(collection, arrays, batch, lookup)[0])

        return jax.grad(loss)(trained)

    trained = collection.trained(state)
    want = jax.jit(gradients)(trained, batch)
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    if way == "shard_map":
        gradients = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    else:
        trained = jax.device_put(trained, NamedSharding(mesh, P()))
        batch = jax.device_put(batch, NamedSharding(mesh, P("x")))
    assert_close(jax.jit(gradients)(trained, batch), want)


def test_tables_are_separated_and_joined(mixed):
    """States of single tables, and a collection of some of them, with their numbers of steps."""
    state = MIXED.replaced(mixed, {"updates": {"step": jnp.array([3.0, 5.0])}})
    states = MIXED.separated(state)
    for name, table in MIXED.separated_tables.items():
        jax_tt.extension.check_state(table, states[name])
    assert [float(states[name]["step"]) for name in MIXED.sharing] == [3, 5]
    assert_same(MIXED.joined(states), state)
    other = jax_tt.Collection(
        {"ordered": MIXED.separated_tables["ordered"]}, {"rows": Feature("ordered")}
    )
    assert other.joined(states)["updates"]["step"].tolist() == [5]
    without = {name: dict(own) for name, own in states.items()}
    del without["ordered"]["step"]
    with pytest.raises(ValueError, match="ordered: state: has no step"):
        MIXED.joined(without)
    without["ordered"]["step"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"states\['ordered'\]\['step'\]: got float32 of shape"):
        MIXED.joined(without)
    destroyed = {**states, "dense": {**states["dense"], "sentinel": jnp.float32(2)}}
    assert float(MIXED.joined(destroyed)["updates"]["sentinel"]) == 2


SHARED = {"step": np.zeros(2, np.float32), "sentinel": np.float32(1), "used": np.float32(1)}


def test_shared_scalars_that_do_not_fit(mixed):
    for updates, message in (
        (None, r"state: got no 'updates', the step counts .* Collection\.joined"),
        ({**SHARED, "sentinel": None}, r"state\['updates'\]\['sentinel'\]: got None"),
        ({**SHARED, "stop": 1}, r"state\['updates'\]: got the array 'stop'"),
        ({**SHARED, "step": None}, r"\['step'\]: got None; expected float32 of shape \(2,\)"),
        ({**SHARED, "step": np.float32(0)}, r"\['step'\]: got 0.0 of float32"),
        ({**SHARED, "step": np.zeros(2, np.int32)}, r"\['updates'\]\['step'\]: got int32"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_tt.lookup_features(MIXED, {**mixed, "updates": updates}, BATCH)


def test_a_table_of_a_collection_on_its_own(mixed):
    ids, lookup = jnp.array([1, 2]), Lookup(method="reference")
    with pytest.raises(ValueError, match=r"dense: a table of a collection .* on its own"):
        jax_tt.lookup(MIXED.tables["dense"], mixed["dense"], ids, lookup)


def test_a_gradient_without_the_shared_scalars_is_refused(mixed):
    """The table would be stepped, and its count not."""
    trained = MIXED.trained(mixed)
    rest = {"updates": trained.pop("updates")}

    def loss(trained):
        arrays = MIXED.replaced(mixed, {**trained, **rest})
        return jnp.sum(jax_tt.lookup_features(MIXED, arrays, BATCH, ZERO)[0]["weighted"])

    with pytest.raises(ValueError, match=r"dense.*but not to its step, sentinel, used"):
        jax.jit(jax.grad(loss))(trained)


def test_a_table_may_not_have_the_name_of_what_tables_share():
    for name in ("updates", "step", "sentinel", "used"):
        with pytest.raises(ValueError, match=f"tables: got the name '{name}'"):
            jax_tt.Collection({name: jax_tt.dense_table(5, 4)}, {"a": Feature(name)})


def test_equal_tables_share_a_loop_of_initial_values():
    """In a traced program, with the values that each table has for its own key."""
    rule = optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
    kinds = {
        "dense": jax_tt.dense_table(7, 3, optimizer=rule),
        "train": jax_tt.tt_table(60, 8, tt_ranks=3, cache=jax_tt.RowCache(8, ways=4)),
        "large": jax_tt.dense_table(1 << 18, 5),
    }
    loops, key = [], jax.random.key(0)
    for copies in ({"dense": 4, "train": 3, "large": 1}, {"dense": 2, "train": 2, "large": 1}):
        tables = {f"{kind}{k}": kinds[kind] for k in range(4) for kind in kinds if k < copies[kind]}
        collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
        lowered = jax.jit(collection.init).lower(key)
        loops.append(lowered.as_text().count("stablehlo.while"))
    assert loops[0] == loops[1] > 0
    state, keys = lowered.compile()(key), jax.random.split(key, len(tables))
    alone = {name[:-1]: jax.jit(table.init) for name, table in collection.tables.items()}
    for name, own_key in zip(tables, keys, strict=True):
        own = alone[name[:-1]](own_key)
        arrays = collection.of(state, name)
        found = {array: arrays[array] for array in own}
        jax.tree.map(np.testing.assert_array_equal, found, own)
