"""All features of a collection in one array: bit for bit the concatenation of the features one by one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Bags, Feature, Lookup, optimizers
from tests.conftest import method_fixture, native_available

method = method_fixture("reference", "native", "cuda_emulated")

RNG = np.random.default_rng(0)
TABLES = {
    "shared": jax_tt.dense_table(300, 5, optimizer=optimizers.RowWiseAdagrad(0.1)),
    "train": jax_tt.tt_table(
        60, 8, tt_ranks=3, row_factors=(8, 8), optimizer=optimizers.Adagrad(0.1)
    ),
    "half": jax_tt.dense_table(
        40, 17, optimizer=optimizers.Adam(0.1), param_dtype="bfloat16", stochastic_rounding=False
    ),
    "plain": jax_tt.dense_table(7, 64),
}
FEATURES = {
    "first": Feature("shared"),
    "mid": Feature("train"),
    "weighted": Feature("plain"),
    "narrow": Feature("half"),
    "last": Feature("shared"),
    "one": Feature("shared", combiner=None),
}
MIXED = jax_tt.Collection(TABLES, FEATURES)
# For the reference, which takes long to trace for a train.
DENSE = jax_tt.Collection(
    {name: table for name, table in TABLES.items() if name != "train"},
    {name: feature for name, feature in FEATURES.items() if feature.table != "train"},
)
BATCH = {
    "first": RNG.integers(0, 300, (4, 300)).astype(
        np.int32
    ),  # more ids in a bag than a kernel takes
    "mid": np.array([[1], [2], [2], [59]], np.int32),
    "weighted": Bags.from_ragged([[5, 6, 5], [], [1], [0]], [[1.0, 2.0, -1.0], [], [0.5], [3.0]]),
    "narrow": Bags.from_padded([[1, 39], [-1, -1], [3, -1], [1, 1]]),
    "last": Bags.from_ragged([[299], [], [], [0, 299, 4]]),
    "one": np.array([4, 0, 4, 7], np.int32),
}


@functools.partial(jax.jit, static_argnums=0)
def arrays_of(collection):
    return collection.init(jax.random.key(0))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def trained(collection, layout, lookup, state, weights, batch):
    """The array, the cotangents of the tables, and those of the weights."""

    def loss(arrays, weights):
        given = dict(batch)
        if "weighted" in given:
            given["weighted"] = Bags(given["weighted"].ids, given["weighted"].offsets, weights)
        state_ = collection.replaced(state, arrays)
        rows, _ = jax_tt.lookup_features(collection, state_, given, lookup, layout=layout)
        if layout == "features":
            rows = jnp.concatenate([rows[name] for name in collection.features], axis=1)
        scale = jnp.arange(rows.size, dtype=rows.dtype).reshape(rows.shape)
        return jnp.sum(jnp.sin(rows) * jnp.cos(scale)), rows

    (_, rows), cotangents = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        collection.trained(state), weights
    )
    return rows, cotangents


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.usefixtures("one_device")
def test_mixed_tables_and_features(method):
    """Of a table with several features, of another kind, without a rule, and of another storage type."""
    lookup = Lookup(dtype="float32", method=method, bounds="zero")
    collection = DENSE if method == "reference" else MIXED
    batch = {name: BATCH[name] for name in collection.features}
    given = arrays_of(collection), BATCH["weighted"].weights, batch
    got = trained(collection, "concatenated", lookup, *given)
    widths = [TABLES[feature.table].features for feature in collection.features.values()]
    assert got[0].shape == (4, sum(widths))
    assert_same(got, trained(collection, "features", lookup, *given))
    assert np.any(got[1][1])


@pytest.mark.usefixtures("one_device")
def test_the_op_writes_the_array():
    """Dense tables whose features are summed: nothing is concatenated or cut, and all values are the same."""
    if not native_available():
        pytest.skip("the native module is not built")
    tables = {name: TABLES[name] for name in ("shared", "plain")}
    features = {name: f for name, f in FEATURES.items() if f.table in tables}
    collection = jax_tt.Collection(tables, features)
    batch = {name: BATCH[name] for name in features}
    given = arrays_of(collection), BATCH["weighted"].weights, batch
    lookup = Lookup(dtype="float32", method="native", bounds="zero")
    programs = {
        layout: trained.lower(collection, layout, lookup, *given).compile()
        for layout in ("concatenated", "features")
    }
    assert_same(programs["concatenated"](*given), programs["features"](*given))
    texts = {layout: program.as_text() for layout, program in programs.items()}
    width = sum(tables[f.table].features for f in features.values())
    joins = {
        layout: len(re.findall(rf"f32\[4,{width}\]\S* concatenate\(", text))
        for layout, text in texts.items()
    }
    assert joins["features"] >= 1 and joins["concatenated"] == 0
    # Forward, backward and update, and one look at the offsets of all features.
    assert len(re.findall(r"custom_call_target=\"jax_tt", texts["concatenated"])) == 4


@pytest.mark.usefixtures("one_device")
def test_ops_read_their_gradients_in_the_array():
    """Beside tables of another kind too: only the gradient of the train is cut out of the array."""
    if not native_available():
        pytest.skip("the native module is not built")
    given = arrays_of(MIXED), BATCH["weighted"].weights, BATCH
    lookup = Lookup(dtype="float32", method="native", bounds="zero")
    text = trained.lower(MIXED, "concatenated", lookup, *given).as_text()
    width = sum(TABLES[f.table].features for f in FEATURES.values())
    cuts = re.findall(rf"slice .*tensor<4x{width}xf32>\) -> tensor<(\w+)>", text)
    assert cuts == ["4x8xf32"]


@pytest.mark.usefixtures("one_device")
def test_features_of_equal_width_are_stacked():
    names = ("first", "last", "one")
    collection = jax_tt.Collection(
        {"shared": TABLES["shared"]}, {name: FEATURES[name] for name in names}
    )
    batch, state = {name: BATCH[name] for name in names}, arrays_of(collection)
    none = {
        "first": np.zeros((0, 2), np.int32),
        "last": np.zeros((0, 1), np.int32),
        "one": BATCH["one"][:0],
    }

    @jax.jit
    def looked_up(state):
        return [
            jax_tt.lookup_features(collection, state, given, layout=layout)[0]
            for given, layout in ((batch, "concatenated"), (batch, "stacked"), (none, "stacked"))
        ]

    wide, stacked, empty = looked_up(state)
    assert_same(stacked, wide.reshape(4, 3, 5))
    assert empty.shape == (0, 3, 5)


@pytest.mark.usefixtures("one_device")
def test_tables_of_several_types():
    """Their array has the widest type, under strict promotion too."""
    types = {"half": "float16", "brain": "bfloat16"}
    tables = {name: jax_tt.dense_table(9, 4, param_dtype=dtype) for name, dtype in types.items()}
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = arrays_of(collection)
    batch = dict.fromkeys(tables, np.array([[1], [8]]))
    layouts = {"concatenated": np.concatenate, "stacked": np.stack}

    @jax.jit
    def looked_up(state):
        return {
            layout: jax_tt.lookup_features(collection, state, batch, layout=layout)[0]
            for layout in ("features", *layouts)
        }

    found = looked_up(state)
    rows = found["features"]
    for layout, join in layouts.items():
        array = found[layout]
        want = join([np.asarray(rows[name], np.float32) for name in tables], axis=1)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("way", ["shard_map", "explicit"])
def test_features_that_are_sharded_in_different_ways(way):
    """Replicated and sharded features side by side, and features of one table."""
    if not native_available():
        pytest.skip("no native module")
    tables = {"a": jax_tt.dense_table(50, 8), "b": jax_tt.dense_table(30, 8)}
    features = {"fa": Feature("a"), "fb": Feature("b"), "again": Feature("b")}
    collection = jax_tt.Collection(tables, features)
    state = arrays_of(collection)
    batch = {name: jnp.asarray(RNG.integers(0, 30, (8, 2)), jnp.int32) for name in features}
    explicit = way == "explicit"
    layout = "concatenated" if explicit else "features"

    def gradient(state, batch):
        def loss(arrays):
            rows, _ = jax_tt.lookup_features(
                collection, arrays, batch, Lookup(bounds="zero"), layout=layout
            )
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(rows))

        return jax.grad(loss)(state)

    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    if explicit:
        whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
        with jax.sharding.set_mesh(mesh):
            got = jax.jit(gradient)(jax.device_put(state, whole), jax.device_put(batch, split))
    else:
        specs = {"fa": P(), "fb": P("x"), "again": P("x")}
        own = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), specs), out_specs=P())
        got = jax.jit(own)(state, batch)
    want = jax.jit(gradient)(state, batch)
    got, want = collection.separated(got), collection.separated(want)
    if not explicit:  # every device adds the loss of the replicated feature
        want["a"] = jax.tree.map(lambda leaf: 4 * leaf, want["a"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("samples", [0, 1])
def test_no_samples_and_no_ids(method, samples):
    names = ("first", "mid", "narrow")
    collection = jax_tt.Collection(
        {FEATURES[name].table: TABLES[FEATURES[name].table] for name in names},
        {name: FEATURES[name] for name in names},
    )
    batch = dict.fromkeys(names, np.zeros((samples, 0), np.int32))
    state, lookup = arrays_of(collection), Lookup(dtype="float32", method=method)
    rows, (after, _) = trained(collection, "concatenated", lookup, state, None, batch)
    assert rows.shape == (samples, 5 + 8 + 17) and not np.any(rows)
    for name in collection.tables:
        own = after[name]
        assert_same(
            own[TABLES[name].spec.param_names[0]], state[name][TABLES[name].spec.param_names[0]]
        )


@pytest.mark.usefixtures("one_device")
def test_only_the_gradient_of_weights():
    state = arrays_of(MIXED)

    def of_weights(weights, layout):
        given = {
            **BATCH,
            "weighted": Bags(BATCH["weighted"].ids, BATCH["weighted"].offsets, weights),
        }
        rows, _ = jax_tt.lookup_features(
            MIXED, state, given, Lookup(dtype="float32"), layout=layout
        )
        if layout == "features":
            rows = jnp.concatenate([rows[name] for name in MIXED.features], axis=1)
        return jnp.sum(jnp.sin(rows))

    @jax.jit
    def gradients(weights):
        return [jax.grad(of_weights)(weights, layout) for layout in ("concatenated", "features")]

    assert_same(*gradients(BATCH["weighted"].weights))


@pytest.mark.usefixtures("one_device")
def test_mapped_over_batches():
    names = ("first", "one")
    collection = jax_tt.Collection(
        {"shared": TABLES["shared"]}, {name: FEATURES[name] for name in names}
    )
    state = arrays_of(collection)
    batch = {
        "first": jnp.asarray(RNG.integers(0, 300, (2, 4, 3)).astype(np.int32)),
        "one": jnp.asarray(RNG.integers(0, 300, (2, 4)).astype(np.int32)),
    }

    def wide(batch):
        return jax_tt.lookup_features(collection, state, batch, layout="concatenated")[0]

    alone = jax.jit(wide)
    want = np.stack([alone(jax.tree.map(lambda x, k=k: x[k], batch)) for k in range(2)])
    assert_same(jax.jit(jax.vmap(wide))(batch), want)


@pytest.mark.usefixtures("one_device")
def test_ids_out_of_range_in_one_array():
    if not native_available():
        pytest.skip("the reference returns NaN")
    batch = {**BATCH, "last": Bags.from_ragged([[299], [300], [], [0]])}
    lookup = Lookup(bounds="error", dtype="float32", method="native")

    @jax.jit
    def looked_up(state):
        return jax_tt.lookup_features(MIXED, state, batch, lookup, layout="concatenated")[0]

    with pytest.raises(Exception, match=r"id 300 at position .*shared"):
        jax.block_until_ready(looked_up(arrays_of(MIXED)))
