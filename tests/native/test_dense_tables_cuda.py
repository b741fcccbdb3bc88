"""Dense tables of a collection in one call of the CUDA kernels: bits of single calls, and few launches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from benchmarks.gpu import stages
from benchmarks.gpu.work import GpuWork
from jax_tt import Bags, Feature, Lookup, TTShape, optimizers
from jax_tt._base import ffi
from tests.conftest import WAYS, method_fixture, native_available
from tests.helpers import assert_same_bits

method = method_fixture(*WAYS[2:])
emulated = pytest.mark.skipif(
    not native_available("cuda_emulated"), reason="the emulator is not built"
)

RULES = {
    "sgd": optimizers.SGD(0.1),
    "rowwise": optimizers.RowWiseAdagrad(0.1),
    "slower": optimizers.RowWiseAdagrad(0.01),
    "adam": optimizers.Adam(0.1),
    "lamb": optimizers.LAMB(0.1),
    "none": None,
}
# rows, columns, storage, rule
TABLES = {
    "usual": (5003, 16, "float32", "rowwise"),
    "slower": (700, 16, "float32", "slower"),
    "odd": (1009, 5, "bfloat16", "adam"),
    "one column": (90, 1, "float32", "sgd"),
    "half": (33, 64, "float16", "lamb"),
    "long bags": (40, 24, "float32", "rowwise"),
    "hot row": (50, 16, "float32", "rowwise"),
    "empty": (70, 8, "float32", "sgd"),
    "plain": (70, 12, "float32", "none"),
    "plain odd": (70, 3, "bfloat16", "none"),
}
# Rows of 16 bits, of columns that packets of four reach and that they do not, in short bags and in long ones.
HALVES = {
    f"{dtype} {columns} {k}": (60, columns, dtype, "rowwise")
    for dtype in ("bfloat16", "float16")
    for columns in (8, 5)
    for k in ("short", "long", "short again", "long again")
}
ALL = TABLES | HALVES
COMBINERS = {"odd": "mean", "half": "sqrtn", "plain": "mean"}
BAGS = 4


def collection_of(names, **options):
    tables = {}
    for name in names:
        rows, columns, dtype, rule = ALL[name]
        of_rule = options if RULES[rule] is not None else {}
        tables[name] = jax_tt.dense_table(
            rows, columns, param_dtype=dtype, optimizer=RULES[rule], **of_rule
        )
    features = {name: Feature(name, combiner=COMBINERS.get(name, "sum")) for name in names}
    return jax_tt.Collection(tables, features, stack=False)


def batch_of(names, bad=False):
    """Ragged bags, some of them empty, with weights and duplicates; with ids out of range if ``bad``."""
    rng = np.random.default_rng(0)
    batch = {}
    for name in names:
        rows = ALL[name][0]
        special = {"empty": [0] * BAGS, "hot row": [100, 0, 100, 100]}
        usual = [700, 0, 40, 3] if "long" in name else [5, 0, 9, 1]
        lengths = special.get(name, usual)
        ids = [rng.integers(0, rows, length).tolist() for length in lengths]
        if name == "hot row":  # one that several tiles of the sorted ids have
            ids[0] = ids[3] = [7] * 100
        if bad and name != "empty":
            ids[2][1:3] = rows, -3
        weights = [rng.normal(size=length).tolist() for length in lengths]
        weighted = name in ("usual", "half", "plain", "plain odd")
        batch[name] = Bags.from_ragged(ids, weights if weighted else None)
    return jax.tree.map(jnp.asarray, batch)


def stepped(collection, lookup, layout, state, batch):
    """The rows, the state after a step, and the gradients of weights and of tables without an optimizer."""
    weights = {name: bags.weights for name, bags in batch.items() if bags.weights is not None}

    def loss(trained, weights):
        given = {
            name: Bags(bags.ids, bags.offsets, weights.get(name)) for name, bags in batch.items()
        }
        arrays = collection.replaced(state, trained)
        rows, _ = jax_tt.lookup_features(collection, arrays, given, lookup, layout=layout)
        leaves = jax.tree.leaves(rows)
        return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in leaves), rows

    (trained, of_weights), rows = jax.grad(loss, (0, 1), has_aux=True)(
        collection.trained(state), weights
    )
    return rows, collection.overwritten(state, trained), of_weights


def initial(collection):
    return jax.jit(collection.init)(jax.random.key(0))


def steps(collection, lookup, layout, batch, one_by_one):
    """A step of the group, and one of every table on its own."""
    state = initial(collection)
    results = []
    for alone in (False, True):
        if alone:
            one_by_one()
        lowered = jax.jit(functools.partial(stepped, collection, lookup, layout)).lower(
            state, batch
        )
        assert (lowered.as_text().count("dense_update_v1") > 1) == alone
        results.append(lowered.compile()(state, batch))
    return results


@pytest.mark.parametrize("bounds", ["zero", "error"])
@pytest.mark.parametrize("skip", [False, True])
def test_bits_are_those_of_single_calls(bounds, skip, one_by_one, method):
    collection = collection_of(TABLES, skip_nonfinite=skip)
    lookup = Lookup(bounds=bounds, method=method)
    batch = batch_of(TABLES, bad=True)
    got, want = steps(collection, lookup, "features", batch, one_by_one)
    assert_same_bits(got, want)
    # Bad ids keep their own tables from a step, and no others.
    taken = dict(zip(collection.sharing, got[1][0]["updates"]["step"].tolist(), strict=True))
    fused = [name for name in TABLES if TABLES[name][3] != "none"]
    assert taken == {name: float(bounds != "error" or name == "empty") for name in fused}


@pytest.mark.parametrize(
    "names",
    [
        ("usual", "slower", "half"),
        ("odd", "usual", "one column", "hot row", "plain"),  # columns that no packets reach
    ],
)
def test_bits_of_sums_in_one_array(names, one_by_one, method):
    tables = {
        name: jax_tt.dense_table(*TABLES[name][:2], optimizer=RULES[TABLES[name][3]])
        for name in names
    }
    features = {name: Feature(name) for name in names}
    features["again"] = Feature(names[1])  # two columns of one table
    collection = jax_tt.Collection(tables, features, stack=False)
    batch = batch_of(names)
    batch = {name: Bags(bags.ids, bags.offsets) for name, bags in batch.items()}
    batch["again"] = Bags(batch[names[1]].ids[::-1], batch[names[1]].offsets)
    lookup = Lookup(method=method)
    got, want = steps(collection, lookup, "concatenated", batch, one_by_one)
    assert_same_bits(got, want)


@pytest.mark.slow
def test_bits_of_16_bit_rows(one_by_one, method):
    lookup = Lookup(method=method)
    got, want = steps(collection_of(HALVES), lookup, "features", batch_of(HALVES), one_by_one)
    assert_same_bits(got, want)


def test_a_large_batch_beside_small_ones(one_by_one, method):
    """The ids of large batches are sorted together, in other launches than those of small ones."""
    names = ("usual", "hot row", "half", "odd")
    batch = batch_of(names, bad=True)
    rng = np.random.default_rng(1)
    ids = rng.integers(-1, TABLES["half"][0] + 1, 66_000)
    for name, count in (("half", len(ids)), ("usual", len(ids) - 50)):
        weights = rng.normal(size=count).astype(np.float32) if name == "usual" else None
        batch[name] = Bags.from_offsets(
            jnp.asarray(ids[:count], jnp.int32), jnp.array([0, 5, 9, 60_000], jnp.int32), weights
        )
    got, want = steps(
        collection_of(names),
        Lookup(bounds="zero", method=method),
        "features",
        batch,
        one_by_one,
    )
    assert_same_bits(got, want)


def test_a_gradient_that_is_not_finite_skips_its_own_table(method):
    names = ("usual", "slower", "odd")
    collection = collection_of(names, skip_nonfinite=True)
    state = initial(collection)
    batch = {name: jnp.zeros((2, 1), jnp.int32) for name in names}

    @jax.jit
    def step(scale):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            lookup = Lookup(method=method)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, lookup)
            return (
                jnp.sum(rows["usual"])
                + scale * jnp.sum(rows["slower"])
                + jnp.sum(rows["odd"].astype(jnp.float32))
            )

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    after = step(jnp.float32(np.inf))
    taken = dict(zip(collection.sharing, after["updates"]["step"].tolist(), strict=True))
    assert taken == {"usual": 1, "slower": 0, "odd": 1}
    assert_same_bits(after["slower"]["embedding"], state["slower"]["embedding"])


def launches_of(collection, batch):
    """Launches of one step, of kernels and of memsets."""
    state = initial(collection)

    def updated(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            lookup = Lookup(method="cuda_emulated")
            rows, _ = jax_tt.lookup_features(
                collection, arrays, batch, lookup, layout="concatenated"
            )
            return jnp.sum(rows)

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    step = jax.jit(updated).lower(state, batch).compile()
    module = ffi.load("cuda_emulated")
    assert module is not None
    module.clear_launch_counts()
    jax.block_until_ready(step(state, batch))
    return sum(count for count, _, _ in module.launch_counts().values())


@emulated
@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize(
    ("tables", "ids"),
    [(3, 18_000), (3, 70_000), pytest.param(200, 18_000, marks=pytest.mark.slow)],
)
def test_few_launches(tables, ids, length):
    """Any number of tables with one rule and one storage type, whose ids one launch sorts, or several."""
    rule = optimizers.RowWiseAdagrad(0.1)
    samples = ids // (20 * tables) + 1
    names = [f"t{k}" for k in range(tables)]
    # Numbers of rows with 21 bits take three passes of the sort, as many as those with 30 bits.
    collection = jax_tt.Collection(
        {name: jax_tt.dense_table(1_100_000 // tables, 2, optimizer=rule) for name in names},
        {name: Feature(name) for name in names},
        stack=False,
    )
    rng = np.random.default_rng(0)
    batch = {
        name: jnp.asarray(rng.integers(0, 1000, (samples, length)), jnp.int32) for name in names
    }

    assert launches_of(collection, batch) <= 20


@emulated
@pytest.mark.parametrize("ids", [10_220, 66_020])
def test_a_step_launches_as_many_kernels_as_its_expected_time_counts(ids):
    shape = TTShape.suggest(70_000, 4, ranks=2)  # 17 bits
    collection = jax_tt.Collection(
        {"rows": jax_tt.dense_table(70_000, 4, optimizer=optimizers.SGD(0.1))},
        {"rows": Feature("rows")},
    )
    # As many samples as the devices of the tests do not divide: one device does all.
    batch = {"rows": jnp.arange(ids, dtype=jnp.int32).reshape(-1, 20)}
    expected = stages.dense_stages(GpuWork(shape, ids // 20, 20))
    assert launches_of(collection, batch) == sum(stage.kernels for stage in expected)


@emulated
def test_calls_that_are_too_large_are_refused_before_they_are_made():
    size = ffi.load("cuda_emulated").dense_workspace_size
    with pytest.raises(ValueError, match=r"at most 2\^31 - 1 ids of all tables"):
        size("update", [10, 10], [8, 8], [2**30, 2**30], 0)
    with pytest.raises(ValueError, match=r"at most 2\^61 rows"):
        size("update", [2**61, 2**60], [8, 8], [70_000, 70_000], 0)
    with pytest.raises(ValueError, match="expected as many of each"):
        size("update", [10], [8, 8], [5], 0)
