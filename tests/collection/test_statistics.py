"""Statistics of collections: counts equal those of numpy, on one device and on several, and are written to logs."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt import Bags, Feature, Lookup, optimizers
from jax_tt._collection.statistics import STATISTICS, TOTALS, _distinct
from jax_tt.pipeline import TableStatistics
from tests.conftest import method_fixture

method = method_fixture("reference", "native")

ORDER = jax_tt.order.IdOrder(np.random.default_rng(0).permutation(60))
RULE = optimizers.SGD(0.1)
# Of "long", a batch has few ids, whose distinct rows are found by a sort.
COLLECTION = jax_tt.Collection(
    {
        "short": jax_tt.dense_table(50, 4, optimizer=RULE),
        "long": jax_tt.dense_table(5000, 4),
        "ordered": jax_tt.tt_table(60, 4, tt_ranks=2, id_order=ORDER),
    },
    {
        "ragged": Feature("short", combiner="mean"),
        "rectangle": Feature("short"),
        "largest": Feature("long", combiner="max"),
        "sequence": Feature("long", combiner=None),
        "padded": Feature("ordered", combiner="sqrtn"),
    },
)
OUTSIDE = ("warn", "clip")


@functools.partial(jax.jit, static_argnums=(0, 3))
def counted(collection: Any, state: Any, batch: Any, lookup: Lookup) -> Any:
    return jax_tt.lookup_features(collection, state, batch, lookup)[1]


@functools.partial(jax.jit, static_argnums=0)
def initial(collection: Any) -> Any:
    return collection.init(jax.random.key(0))


def fresh(collection: Any) -> Any:
    return collection.with_statistics(initial(collection))


def model(rows: int, ids: Any, bounds: str, order: Any = None) -> TableStatistics:
    """The statistics of one batch of a table without a cache; ``order`` has the row of every id."""
    ids = np.asarray(ids, object).ravel()
    inside = [i for i in ids if 0 <= i < rows]
    read = [i if order is None else int(order[i]) for i in inside]
    if bounds == "clip":
        read += [0 if i < 0 else rows - 1 for i in ids if not 0 <= i < rows]
    return TableStatistics(len(ids), len(set(read)), len(ids) - len(inside), None)


def added(left: TableStatistics, right: TableStatistics) -> TableStatistics:
    sums = (None if a is None else a + b for a, b in zip(left, right, strict=True))
    return TableStatistics(*sums)


def random_batch(rng: np.random.Generator, bounds: str) -> tuple[Any, dict[str, list[int]]]:
    """A batch with many duplicates, and its ids by table."""

    def ids(rows: int, *shape: int) -> np.ndarray:
        found = rng.integers(0, rows, shape)
        if bounds in OUTSIDE:
            strange = rng.choice([-1, -(2**31), rows, 2**31 - 1], shape)
            found = np.where(rng.random(shape) < 0.2, strange, found)
        return found.astype(np.int32)

    ragged = [ids(50, length).tolist() for length in rng.integers(0, 5, 6)]
    padded = ids(60, 4, 3)
    padded[rng.random(padded.shape) < 0.4] = -1
    batch = {
        "ragged": Bags.from_ragged(ragged, capacity=40),
        "rectangle": ids(50, 5, 4),
        "largest": Bags.from_ragged([ids(5000, 3).tolist(), []], capacity=5),
        "sequence": ids(5000, 2, 3),
        "padded": Bags.from_padded(padded),
    }
    largest = np.asarray(batch["largest"].ids)[:3]
    return batch, {
        "short": [*itertools.chain(*ragged), *batch["rectangle"].ravel().tolist()],
        "long": [*largest.tolist(), *batch["sequence"].ravel().tolist()],
        "ordered": padded[padded != -1].tolist(),
    }


@pytest.mark.parametrize("bounds", ["error", "warn", "clip"])
def test_counts_of_random_batches(bounds, method):
    rng = np.random.default_rng(1)
    state = fresh(COLLECTION)
    want = dict.fromkeys(COLLECTION.tables, TableStatistics(0, 0, 0, None))
    for _ in range(3):
        batch, ids = random_batch(rng, bounds)
        state = counted(COLLECTION, state, batch, Lookup(bounds=bounds, method=method))
        for name, table in COLLECTION.tables.items():
            ordered = jax_tt.tables.find(table, jax_tt.tables.OrderedTable)
            order = None if ordered is None else ordered.id_order.rows
            counts = model(table.num_embeddings, ids[name], bounds, order)
            want[name] = added(want[name], counts)
    assert COLLECTION.statistics(state) == want
    assert want["short"].unique < want["short"].requests
    assert (want["short"].out_of_range > 0) == (bounds in OUTSIDE)


HUGE = jax_tt.TTShape(4_000_000_000, 8, 2, (1600, 1600, 1600), (2, 2, 2))


@pytest.mark.parametrize("kind", ["uint32", "int64", "split"])
def test_kinds_of_ids(kind):
    shape, rows = HUGE, HUGE.num_embeddings
    table = jax_tt.tables.TTTable.of_shape(shape)
    collection = jax_tt.Collection({"t": table}, {"t": Feature("t"), "u": Feature("t")})
    ids = np.array([[5, 7, 5], [rows - 1, rows, 0], [rows - 1, 7, 2**32 - 1]], np.int64)
    with jax.enable_x64(kind == "int64"):
        given: Any = shape.split_ids(ids) if kind == "split" else ids.astype(kind)
        batch, state = {"t": given, "u": given}, fresh(collection)
        for bounds in ("zero", "clip"):
            after = counted(collection, state, batch, Lookup(bounds=bounds))
            assert collection.statistics(after)["t"] == model(rows, [ids, ids], bounds)


def test_empty_batches():
    collection = jax_tt.Collection(
        {"few": jax_tt.dense_table(3, 2), "many": jax_tt.dense_table(5000, 2)},
        {"few": Feature("few"), "many": Feature("many")},
    )
    none, state = TableStatistics(0, 0, 0, None), fresh(collection)
    for empty in (np.zeros((0, 3), np.int32), np.zeros((3, 0), np.int32)):
        after = counted(collection, state, {"few": empty, "many": empty}, Lookup())
        assert collection.statistics(after) == {"few": none, "many": none}


AD = jax_tt.Collection({"ad": jax_tt.dense_table(9, 2, optimizer=RULE)}, {"ad": Feature("ad")})
IDS = np.array([[1, 2], [2, 2], [10, 1], [3, 1]], np.int32)
OF_IDS = TableStatistics(8, 3, 1, None)
ZERO = Lookup(bounds="zero")


def test_totals_have_64_bits():
    state = fresh(AD)
    totals = jnp.full((4, 2), 2**32 - 2, jnp.uint32).at[:, 1].set(5)
    state[STATISTICS][TOTALS] = {"ad": totals}
    state = counted(AD, state, {"ad": IDS}, ZERO)
    before = (5 << 32) + 2**32 - 2
    start = TableStatistics(before, before, before, None)
    assert AD.statistics(state)["ad"] == added(start, OF_IDS)


def test_a_state_without_statistics_counts_nothing():
    state = initial(AD)
    assert STATISTICS not in counted(AD, state, {"ad": IDS}, ZERO)
    with pytest.raises(
        ValueError, match=r"state: got no statistics; .* Collection.with_statistics"
    ):
        AD.statistics(state)
    counting = AD.with_statistics(state)
    counting = counted(AD, counting, {"ad": IDS}, Lookup(bounds="zero", train=False))
    assert AD.statistics(counting)["ad"].requests == 0
    assert STATISTICS not in AD.separated(counting)


def test_statistics_that_do_not_fit():
    state = fresh(AD)
    right, message = jnp.zeros((4, 2), jnp.uint32), r"state\['statistics'\]\['totals'\]"
    for wrong in (jnp.zeros((2, 4), jnp.uint32), jnp.zeros((4, 2)), None):
        state[STATISTICS] = {TOTALS: {"ad": wrong}}
        with pytest.raises(ValueError, match=rf"{message}\['ad'\]: got .*expected"):
            jax_tt.lookup_features(AD, state, {"ad": IDS}, ZERO)
    for wrong in ({"add": right}, {"ad": right, "user": right}, {}):
        state[STATISTICS] = {TOTALS: wrong}
        with pytest.raises(ValueError, match=rf"{message}: got the tables .*; expected 'ad'"):
            AD.statistics(state)
    state[STATISTICS] = None
    with pytest.raises(TypeError, match=r"state\['statistics'\]: got None; expected a mapping"):
        AD.statistics(state)
    with pytest.raises(ValueError, match="tables: got the name 'statistics'"):
        jax_tt.Collection({"statistics": jax_tt.dense_table(9, 2)}, {"f": Feature("statistics")})


def test_rows_in_several_parts():
    rows = [jnp.array([0, 0, 1, 1, 0]), jnp.array([5, 6, 5, 6, 5])]
    for num_embeddings in (60, 2**31):
        assert _distinct(rows, num_embeddings) == 4


def test_exported_programs_with_batches_of_any_size():
    state = fresh(AD)
    (bags,) = jax.export.symbolic_shape("bags")
    ids = jax.ShapeDtypeStruct((bags, 2), jnp.int32)
    count = jax.jit(lambda state, ids: counted(AD, state, {"ad": ids}, ZERO)[STATISTICS])
    exported = jax.export.export(count, disabled_checks=jax_tt.export.checks())(state, ids)
    assert AD.statistics({STATISTICS: exported.call(state, IDS)})["ad"] == OF_IDS


def test_a_training_step_keeps_them():
    """They flow through a loss, its gradients and the maintenance beside the tables."""

    @jax.jit
    def step(state):
        def loss(trained):
            arrays = AD.replaced(state, trained)
            rows, after = jax_tt.lookup_features(AD, arrays, {"ad": IDS}, ZERO)
            return jnp.sum(rows["ad"]), after

        gradients, state = jax.grad(loss, has_aux=True)(AD.trained(state))
        return AD.maintain(AD.overwritten(state, gradients)[0])

    state = step(step(fresh(AD)))
    assert AD.statistics(state)["ad"] == added(OF_IDS, OF_IDS)
    assert state["updates"]["step"].tolist() == [2]


def test_examples_of_a_vmap():
    def count(state, ids):
        return jax_tt.lookup_features(AD, state, {"ad": ids}, ZERO)[1][STATISTICS]

    state = fresh(AD)
    want = functools.reduce(added, [model(9, ids, "zero") for ids in IDS])
    one = jax.jit(jax.vmap(count, (None, 0), None))(state, IDS[:, None])
    assert AD.statistics({STATISTICS: one})["ad"] == want
    many = jax.tree.map(lambda array: jnp.stack([array] * 4), state)
    each = jax.jit(jax.vmap(count))(many, IDS[:, None])
    for k, ids in enumerate(IDS):
        own = jax.tree.map(lambda array, k=k: array[k], each)
        assert AD.statistics({STATISTICS: own})["ad"] == model(9, ids, "zero")
    with pytest.raises(ValueError, match="statistics of several models"):
        AD.statistics({STATISTICS: each})


@pytest.mark.parametrize("tracked", [True, False])
def test_shards_of_a_batch(tracked):
    """Rows of several shards are counted once, and every device has the totals of all."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    lookup = Lookup(bounds="zero", axis_name=None if tracked else "data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=tracked
    )
    def count(state, ids):
        return jax_tt.lookup_features(AD, state, {"ad": ids}, lookup)[1][STATISTICS]

    assert AD.statistics({STATISTICS: count(fresh(AD), IDS)})["ad"] == OF_IDS


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        ids = jax.device_put(IDS, NamedSharding(mesh, P("data", None)))
        state = counted(AD, fresh(AD), {"ad": ids}, ZERO)
        assert AD.statistics(state)["ad"] == OF_IDS


# --- Layers

CACHE = jax_tt.RowCache(8, ways=4, refresh_every=1, write_back=None)
TABLES = {
    "word": jax_tt.tt_table(60, 8, tt_ranks=2, optimizer=RULE, cache=CACHE),
    "ad": jax_tt.dense_table(9, 2),
}
FEATURES = {"word": Feature("word"), "ad": Feature("ad", combiner=None)}
BATCH = {"word": np.array([[1, 2, 2], [1, 60, 7]], np.int32), "ad": np.array([8, -2], np.int32)}
AFTER_ONE = {"word": TableStatistics(6, 3, 1, 0), "ad": TableStatistics(2, 1, 1, None)}
look_up = nnx.jit(lambda embed, batch: embed(batch))


@pytest.fixture(scope="module")
def trained() -> Any:
    """A layer after three batches, whose row cache was filled after the first one."""
    embed = jax_tt.EmbedCollection(TABLES, FEATURES, statistics=True, rngs=nnx.Rngs(0))
    look_up(embed, BATCH)
    assert embed.statistics() == AFTER_ONE
    jax_tt.refresh_caches(embed)
    for _ in range(2):
        look_up(embed, BATCH)
    return embed


def test_nnx_counts_training_calls(trained):
    embed = nnx.clone(trained)
    found = embed.statistics()
    assert found == {"word": TableStatistics(18, 9, 3, 10), "ad": TableStatistics(6, 3, 3, None)}
    cache = embed.tables["word"].cache_statistics()
    assert found["word"].cache_hits == cache["requested"] - cache["misses"]
    embed.eval()
    look_up(embed, BATCH)
    assert embed.statistics() == found
    embed.train()
    look_up(embed, BATCH)
    assert embed.statistics()["ad"].requests == 8
    without = jax_tt.EmbedCollection(AD.tables, AD.features, rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(without, jax_tt.nnx.LookupCounts))
    with pytest.raises(ValueError, match="expected one with statistics=True"):
        without.statistics()


def test_nnx_in_a_plain_jit_counts_nothing():
    embed = jax_tt.EmbedCollection(AD.tables, AD.features, statistics=True, rngs=nnx.Rngs(0))
    jax.jit(lambda batch: embed(batch)["ad"])({"ad": IDS})
    assert embed.statistics()["ad"].requests == 0


def test_layers_outside_of_training_count_nothing():
    lookup = Lookup(bounds="zero", train=False)
    module = jax_tt.linen.EmbedCollection(AD.tables, AD.features, lookup)
    variables = module.init(jax.random.key(0), {"ad": IDS})
    _, changed = module.apply(variables, {"ad": IDS}, mutable=[STATISTICS])
    assert STATISTICS not in changed


def test_nnx_checkpoints_have_them(trained):
    stored = serialization.to_bytes(nnx.to_pure_dict(nnx.state(trained)))
    other = jax_tt.EmbedCollection(TABLES, FEATURES, statistics=True, rngs=nnx.Rngs(1))
    arrays = serialization.from_bytes(nnx.to_pure_dict(nnx.state(other)), stored)
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, arrays)
    nnx.update(other, state)
    assert other.statistics() == trained.statistics()
    # States of single tables are without them.
    other = jax_tt.EmbedCollection(TABLES, FEATURES, statistics=True, rngs=nnx.Rngs(1))
    other.set_states(trained.states())
    assert other.statistics()["ad"].requests == 0


def test_linen_counts_in_a_mutable_collection():
    embed = jax_tt.linen.EmbedCollection(TABLES, FEATURES)
    collection = jax_tt.Collection(TABLES, FEATURES)
    variables = jax.jit(embed.init)(jax.random.key(0), BATCH)
    assert STATISTICS not in variables
    step = jax.jit(functools.partial(embed.apply, mutable=[STATISTICS]))
    _, changed = step(variables, BATCH)
    assert collection.statistics(changed) == AFTER_ONE
    restored = serialization.from_bytes(changed, serialization.to_bytes(changed))
    _, changed = step({**variables, **restored}, BATCH)
    assert collection.statistics(changed)["ad"] == TableStatistics(4, 2, 2, None)
    other = {STATISTICS: {TOTALS: {"ad": jnp.zeros((4, 2), jnp.uint32)}}}
    with pytest.raises(ValueError, match=r"got the tables 'ad'; expected 'word', 'ad'"):
        step({**variables, **other}, BATCH)


# --- The reporter


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written.append((tag, value, step))


def test_a_reporter_reads_every_few_steps():
    totals = {"t": TableStatistics(0, 0, 0, 0), "u": TableStatistics(0, 0, 0, None)}
    reads = []

    def read() -> Any:
        reads.append(dict(totals))
        return reads[-1]

    writer = Writer()
    reporter = jax_tt.pipeline.StatisticsReporter(3, writer, prefix="p")
    for step in range(1, 8):
        totals["t"] = added(totals["t"], TableStatistics(4 * step, step, 2, 1))
        reporter(step, read)
    assert len(reads) == 2
    first = {"requests": 24, "unique": 6, "out_of_range": 6, "cache_hits": 3}
    first |= {"unique_share": 0.25, "out_of_range_share": 0.25, "cache_hit_rate": 0.125}
    second = {"requests": 84, "unique": 21, "out_of_range": 12, "cache_hits": 6}
    second |= {"unique_share": 0.25, "out_of_range_share": 0.1, "cache_hit_rate": 0.05}
    unused = {"requests": 0, "unique": 0, "out_of_range": 0}
    want = [
        (f"p/{table}/{name}", value, step)
        for step, of_t in ((3, first), (6, second))
        for table, values in (("t", of_t), ("u", unused))
        for name, value in values.items()
    ]
    assert sorted(writer.written) == sorted(want)


def test_a_reporter_of_totals_that_began_anew():
    written: dict[str, float] = {}
    reporter = jax_tt.pipeline.StatisticsReporter(
        1, lambda tag, value, step: written.update({tag: value})
    )
    for count in (8, 4):
        reporter(count, lambda count=count: {"t": TableStatistics(count, count // 2, 1, None)})
    assert written["embedding/t/out_of_range_share"] == 0.25


def test_arguments_of_a_reporter(trained):
    with pytest.raises(ValueError, match="every: got 0; expected an integer >= 1"):
        jax_tt.pipeline.StatisticsReporter(0, print)
    with pytest.raises(TypeError, match="write: got None; expected a function"):
        jax_tt.pipeline.StatisticsReporter(1, None)
    reporter = jax_tt.pipeline.StatisticsReporter(1, print)
    with pytest.raises(TypeError, match=r"read: got a dict; .*without parentheses"):
        reporter(1, trained.statistics())
    with pytest.raises(TypeError, match=r"step: got 1\.5"):
        reporter(1.5, trained.statistics)
