"""TT tables of a collection in one call of the CUDA kernels: bits of single calls, and few launches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from benchmarks.gpu import stages, work
from jax_tt import Bags, Feature, Lookup, optimizers
from jax_tt._base import ffi
from tests.conftest import WAYS, method_fixture, native_available
from tests.helpers import assert_same_bits, f64, on_gpu

method = method_fixture(*WAYS[2:])
emulated = pytest.mark.skipif(
    not native_available("cuda_emulated"), reason="the emulator is not built"
)

ADAGRAD = optimizers.RowWiseAdagrad(0.1)
# Specialised and general passes, several storage types and rules, and two tables without a rule.
FAST = {"tt_ranks": 16, "row_factors": (8, 5, 8), "col_factors": (2, 4, 2)}
TABLES = {
    "fast": (200, 16, FAST, ADAGRAD),
    "fast again": (210, 16, FAST, optimizers.RowWiseAdagrad(0.01)),
    "fast free": (210, 16, FAST, None),
    "usual": (60, 8, {"tt_ranks": 3}, ADAGRAD),
    "half": (2001, 8, {"tt_ranks": (3, 5), "param_dtype": "bfloat16"}, optimizers.Adam(0.1)),
    "short": (
        70,
        6,
        {"tt_ranks": 4, "row_factors": (7, 10), "col_factors": (2, 3)},
        optimizers.LAMB(0.1),
    ),
    "long bags": (90, 8, {"tt_ranks": 2, "param_dtype": "float16"}, optimizers.SGD(0.1)),
    "many slices": (3000, 4, {"tt_ranks": 2, "row_factors": (2, 1500)}, ADAGRAD),
    "empty": (60, 8, {"tt_ranks": 3}, ADAGRAD),
    "free": (500, 4, {"tt_ranks": 2}, None),
}
WEIGHTED = ("fast", "short", "free")


def collection_of(names, **options):
    tables = {}
    for name in names:
        rows, columns, shape, rule = TABLES[name]
        of_rule = {} if rule is None else {"optimizer": rule, **options}
        tables[name] = jax_tt.tt_table(rows, columns, **shape, **of_rule)
    return jax_tt.Collection(tables, {name: Feature(name) for name in names})


def initial(collection):
    return jax.jit(collection.init)(jax.random.key(0))


def batch_of(names, bad=()):
    """Ragged bags with duplicates, some with weights; with an id out of range for the tables ``bad``."""
    rng = np.random.default_rng(0)
    batch = {}
    for name in names:
        rows = TABLES[name][0]
        lengths = {"empty": [0] * 4, "long bags": [300, 0, 40, 3]}.get(name, [5, 0, 9, 1])
        ids = [rng.integers(0, rows, length).tolist() for length in lengths]
        if name in bad:
            ids[2][1:3] = rows + 5000, -3
        weights = [rng.normal(size=length).tolist() for length in lengths]
        batch[name] = Bags.from_ragged(ids, weights if name in WEIGHTED else None)
    return jax.tree.map(jnp.asarray, batch)


def stepped(collection, lookup, state, batch, scale=1.0):
    """The rows, what a step makes of the state, and the gradients of weights and of tables without a rule."""
    weights = {name: bags.weights for name, bags in batch.items() if bags.weights is not None}

    def loss(trained, weights):
        given = {
            name: Bags(bags.ids, bags.offsets, weights.get(name)) for name, bags in batch.items()
        }
        arrays = collection.replaced(state, trained)
        rows, _ = jax_tt.lookup_features(collection, arrays, given, lookup)
        sums = {name: jnp.sum(jnp.sin(out.astype(jnp.float32))) for name, out in rows.items()}
        return sum(sums.values()) + (scale - 1) * next(iter(sums.values())), rows

    (trained, of_weights), rows = jax.grad(loss, (0, 1), has_aux=True)(
        collection.trained(state), weights
    )
    return rows, collection.overwritten(state, trained), of_weights


@pytest.mark.parametrize(
    ("bounds", "skip"), [("error", False), pytest.param("zero", True, marks=pytest.mark.slow)]
)
def test_bits_are_those_of_single_calls(bounds, skip, one_by_one, method):
    collection = collection_of(TABLES, skip_nonfinite=skip)
    state, batch = initial(collection), batch_of(TABLES, bad=("usual", "fast again"))
    lookup = Lookup(bounds=bounds, method=method)
    lowered = jax.jit(functools.partial(stepped, collection, lookup)).lower(state, batch)
    platform = "cuda" if on_gpu() else method
    for op in ("forward", "backward", "update"):
        assert lowered.as_text().count(f"@{ffi.target(platform, op)}") == 1
    got = lowered.compile()(state, batch)
    one_by_one()
    alone = jax.jit(functools.partial(stepped, collection, lookup)).lower(state, batch)
    assert alone.as_text().count(f"@{ffi.target(platform, 'update')}") > 1
    assert_same_bits(got, alone.compile()(state, batch))
    # Bad ids keep their own tables from a step, and no others.
    taken = dict(zip(collection.sharing, got[1][0]["updates"]["step"].tolist(), strict=True))
    refused = {"usual", "fast again"} if bounds == "error" else set()
    assert {name for name, steps in taken.items() if steps == 0} == refused


@pytest.mark.slow
@pytest.mark.parametrize("n", [9, 17_000])
def test_broken_offsets_make_nan_and_no_update(n, method):
    """In the one launch that plans few ids, and in those that plan many."""
    table = jax_tt.tt_table(60, 4, tt_ranks=2, optimizer=ADAGRAD)
    collection = jax_tt.Collection({"a": table}, {"a": Feature("a")})
    state = initial(collection)
    bags = Bags(jnp.arange(n, dtype=jnp.int32) % 60, jnp.array([0, n // 2, 3], jnp.int32))
    step = jax.jit(functools.partial(stepped, collection, Lookup(bounds="error", method=method)))
    rows, (after, _), _ = step(state, {"a": bags})
    assert np.isnan(rows["a"]).any()
    assert_same_bits(after, state)


def test_a_gradient_that_is_not_finite_skips_its_own_table(method):
    names = ("usual", "fast", "half")
    collection = collection_of(names, skip_nonfinite=True)
    state, batch = initial(collection), batch_of(names)
    step = jax.jit(functools.partial(stepped, collection, Lookup(bounds="error", method=method)))
    _, (after, _), _ = step(state, batch, scale=jnp.float32(np.inf))
    after, state = collection.separated(after), collection.separated(state)
    assert_same_bits(after["usual"], state["usual"])
    taken = {name: float(after[name]["step"]) for name in collection.sharing}
    assert taken == {"usual": 0, "fast": 1, "half": 1}


def assert_same_steps(method, tables, batch, one_by_one, init=initial):
    """That a step of these tables in common has the bits of steps of each."""
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state, lookup = init(collection), Lookup(method=method)
    got = jax.jit(functools.partial(stepped, collection, lookup))(state, batch)
    assert all(np.any(np.asarray(rows, np.float32)) for rows in got[0].values())
    one_by_one()
    assert_same_bits(got, jax.jit(functools.partial(stepped, collection, lookup))(state, batch))


def test_rows_of_split_ids(one_by_one, method):
    table = jax_tt.tt_table(6_000_000_000, 8, tt_ranks=2, optimizer=ADAGRAD)
    assert isinstance(table, jax_tt.tables.TTTable)
    split = table.shape.split_ids(np.array([5_999_999_999, 0, 2**31 + 7]))
    bags = Bags(split, np.array([0, 1, 1, 3], np.int32))
    assert_same_steps(method, {"a": table, "b": table}, {"a": bags, "b": bags}, one_by_one)


@pytest.mark.slow
def test_batches_of_very_different_sizes(one_by_one, method):
    """Sorts of one launch and of many, which the tables have at different places of their order."""
    table = jax_tt.tt_table(60, 4, tt_ranks=2, optimizer=ADAGRAD)
    rng = np.random.default_rng(0)
    batch = {
        f"t{n}": Bags.from_lengths(rng.integers(0, 60, n).astype(np.int32), [n // 2, 0, n - n // 2])
        for n in (3, 4097, 17_000, 17_500, 4200, 4300)
    }
    # Of one slice in a core, which one launch plans for fewer ids.
    flat = {"row_factors": (1, 60), "col_factors": (2, 2)}
    other = jax_tt.tt_table(60, 4, tt_ranks=2, optimizer=ADAGRAD, **flat)
    tables = dict.fromkeys(batch, table) | {"t4200": other, "t4300": other}
    assert_same_steps(method, tables, batch, one_by_one)


@pytest.mark.slow
def test_digits_that_do_not_fit_into_one_word_are_sorted_in_passes(one_by_one, method):
    table = jax_tt.tt_table(10**15, 8, tt_ranks=2, optimizer=ADAGRAD)
    assert isinstance(table, jax_tt.tables.TTTable)
    rng, batch = np.random.default_rng(0), {}
    for n in (20, 30, 4200, 4300):  # pairs that a thread sorts: up to 8, and more
        ids = rng.choice(rng.integers(0, 10**15, 50), n)
        batch[f"t{n}"] = Bags(table.shape.split_ids(ids), np.array([0, n // 2, n], np.int32))
    assert_same_steps(method, dict.fromkeys(batch, table), batch, one_by_one)


# Column factors and ranks of the tiles of the specialised passes, one of each rank.
TILES = [
    ((4, 4, 8), 16),
    ((2, 8, 4), 16),
    ((2, 8, 2), 32),
    ((8, 2, 8), 32),
    ((2, 4, 8), 64),
    ((4, 4, 4), 128),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "precision", "tiles"),
    [
        ("float32", "highest", TILES),
        ("float32", "high", TILES),
        ("bfloat16", None, TILES),
        ("float16", None, TILES[:1]),
    ],
)
def test_specialised_passes_take_several_tables(dtype, precision, tiles, one_by_one, method):
    rng, tables, batch = np.random.default_rng(0), {}, {}
    # Cores of rank 128 take at least these factors.
    rows = (50, 3, 50)
    for name, (columns, rank) in {f"{k} {tile}": tile for tile in tiles for k in "ab"}.items():
        tables[name] = jax_tt.tt_table(
            int(np.prod(rows)),
            int(np.prod(columns)),
            tt_ranks=rank,
            row_factors=rows,
            col_factors=columns,
            param_dtype=dtype,
            optimizer=ADAGRAD,
        )
        batch[name] = Bags.from_lengths(rng.integers(0, 7500, 6).astype(np.int32), [2, 0, 4])
    with jax.default_matmul_precision(precision or "highest"):
        assert_same_steps(method, tables, batch, one_by_one)


@pytest.mark.slow
def test_general_passes_of_16_bits_and_of_odd_columns_take_several_tables(one_by_one, method):
    shapes = {
        "half": (2001, 8, {"tt_ranks": (3, 5), "param_dtype": "float16"}),
        "odd": (70, 3, {"tt_ranks": 4, "row_factors": (7, 10), "col_factors": (1, 3)}),
    }
    rng, tables, batch = np.random.default_rng(0), {}, {}
    for name, (rows, columns, options) in shapes.items():
        for k in "ab":
            tables[name + k] = jax_tt.tt_table(rows, columns, optimizer=ADAGRAD, **options)
            ids = rng.choice(rng.integers(0, rows, 20), 600).astype(np.int32)
            batch[name + k] = Bags.from_lengths(ids, [1, 0, 599])
    assert_same_steps(method, tables, batch, one_by_one)


@emulated
@pytest.mark.slow
def test_plans_of_sharded_batches_are_checked_together():
    names = ("usual", "fast", "half")
    collection = collection_of(names)
    state = initial(collection)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, TABLES[name][0], (8, 5)).astype(np.int32) for name in names}
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over_devices = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    @jax.jit
    def step(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            lookup = Lookup(method="cuda_emulated")
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, lookup)
            return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in rows.values())

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    module = ffi.load("cuda_emulated")
    assert module is not None
    module.clear_launch_counts()
    got = jax.block_until_ready(step(state, jax.device_put(batch, over_devices)))
    assert module.launch_counts()["ComparePlan"][0] > 0
    want = step(state, batch)
    for name in (*names, "updates"):
        tolerance = 1e-2 if name == "half" else 1e-5
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            np.testing.assert_allclose(f64(a), f64(b), rtol=tolerance, atol=tolerance)


def patterned(collection):
    """A state in which the same thousand numbers fill all arrays: it takes long to draw as many as memory holds."""

    def filled(array):
        return jnp.asarray(np.resize(np.linspace(-0.1, 0.1, 1000), array.shape).astype(array.dtype))

    return jax.tree.map(filled, jax.eval_shape(collection.init, jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.dear("the tables of one turn take 256 MiB")
def test_tables_that_need_much_memory_take_turns(one_by_one, method):
    """The update needs the gradients of all cores, more than 128 MiB of each of these tables."""
    table = jax_tt.tt_table(
        8560,
        4096,
        tt_ranks=500,
        row_factors=(1070, 8),
        col_factors=(64, 64),
        optimizer=optimizers.SGD(0.1),
        skip_nonfinite=True,
    )
    tables = dict.fromkeys("ab", table)
    batch = {name: Bags.from_ragged([[k, 8559], [], [k]]) for k, name in enumerate(tables)}
    assert_same_steps(method, tables, batch, one_by_one, patterned)


@pytest.mark.parametrize("platform", ["cuda_emulated", "cuda"])
def test_the_workspace_of_many_tables_is_bounded(platform):
    module = ffi.load(platform)
    if module is None:
        pytest.skip(str(ffi.why_unavailable(platform)))
    size = module.tables_workspace_size
    mib = 2**20
    assert size([5 * mib]) == 5 * mib
    assert 15 * mib < size([5 * mib] * 3) < 16 * mib
    assert size([5 * mib] * 300) < 257 * mib
    assert 400 * mib <= size([5 * mib, 400 * mib, 5 * mib]) < 401 * mib


def launches_of(tables, samples, length=1):
    """Grids that a step of these tables launches on one device.

    The devices of the tests must not divide the number of samples: a batch that XLA may partition over several devices
    has other launches.
    """
    collection = jax_tt.Collection(tables, {name: Feature(name) for name in tables})
    state = initial(collection)
    rng = np.random.default_rng(0)
    batch = {
        name: jnp.asarray(rng.integers(0, 60, (samples, length)), jnp.int32) for name in tables
    }

    def updated(state, batch):
        def loss(trained):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(
                collection, arrays, batch, Lookup(method="cuda_emulated")
            )
            return sum(jnp.sum(out.astype(jnp.float32)) for out in rows.values())

        return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]

    step = jax.jit(updated).lower(state, batch).compile()
    module = ffi.load("cuda_emulated")
    assert module is not None
    before = module.launches()
    jax.block_until_ready(step(state, batch))
    return module.launches() - before


@emulated
def test_a_step_launches_five_kernels():
    """The step of the headline table, with fewer ids."""
    table = jax_tt.tt_table(
        11_000_000,
        64,
        tt_ranks=32,
        row_factors=(200, 220, 250),
        col_factors=(4, 4, 4),
        optimizer=optimizers.SGD(0.1),
    )
    module = ffi.load("cuda_emulated")
    if module is None:
        pytest.skip(str(ffi.why_unavailable("cuda_emulated")))
    module.clear_launch_counts()
    assert launches_of({"a": table}, 17, 20) == 5
    launched = {kernel: count for kernel, (count, _, _) in module.launch_counts().items()}
    kernels = ("PlanSlices", "MakeRowsFast", "SumLines", "MakeSharesFast", "SumAndStepSlices")
    assert launched == dict.fromkeys(kernels, 1)
    # What the expected times in docs/performance.md count.
    assert sum(stage.kernels for stage in stages.stages(work.headline(quick=False))) == 5


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 41])
def test_few_launches_of_mixed_tables(length):
    """Seven tensor trains and 19 dense tables, of few ids and of many."""
    train = jax_tt.tt_table(
        800,
        16,
        tt_ranks=16,
        row_factors=(8, 10, 10),
        col_factors=(2, 4, 2),
        optimizer=ADAGRAD,
    )
    tables = {f"tt{k}": train for k in range(7)}
    tables |= {f"d{k}": jax_tt.dense_table(10_000, 16, optimizer=ADAGRAD) for k in range(19)}
    assert launches_of(tables, 11, length) == stages.MIXED_LAUNCHES <= 20


@emulated
def test_every_signature_adds_some_launches():
    """Every further pass, rule or storage type costs the launches of what differs, not those of a table."""
    table = functools.partial(jax_tt.tt_table, 60, 8, tt_ranks=3)
    rules = [ADAGRAD, optimizers.Adam(0.1)]
    one = launches_of({"a": table(optimizer=ADAGRAD)}, 11)
    same = {f"t{k}": table(optimizer=ADAGRAD) for k in range(4)}
    more_than_one_list = {f"t{k}": table(optimizer=ADAGRAD) for k in range(40)}
    rules = {f"t{k}": table(optimizer=rules[k % 2]) for k in range(4)}
    types = {
        f"t{k}": table(optimizer=ADAGRAD, param_dtype=["float32", "bfloat16"][k % 2])
        for k in range(4)
    }
    of_same = launches_of(same, 11)
    assert of_same <= one + 4  # what clears memory and writes the descriptions of the tables
    assert launches_of(more_than_one_list, 11) <= 10
    assert launches_of(rules, 11) == of_same + 1
    assert launches_of(types, 11) == of_same + 3
