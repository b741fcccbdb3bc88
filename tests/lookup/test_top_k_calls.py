"""`top_k` under transformations, in layers, of sharded and hash tables; its memory, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jax_tt
import jax_tt.linen
from tests.conftest import native_available
from tests.lookup.test_top_k import D, N, searched

RNG = np.random.default_rng(0)
DENSE = jax_tt.dense_table(N, D)
ROWS = RNG.integers(-1, 2, (N, D)).astype(np.float32)
STATE = {"embedding": jnp.asarray(ROWS)}
QUERIES = RNG.integers(-2, 3, (6, D)).astype(np.float32)
QUERIES[1] = 0
EXCLUDE = RNG.integers(-1, N, (6, 4))


def of_dense(state, queries, exclude=None, **options):
    return jax_tt.top_k(DENSE, state, queries, 7, exclude=exclude, **options)


def equal(found, want):
    jax.tree.map(np.testing.assert_array_equal, tuple(found), tuple(want))


def test_transformations():
    want = searched(ROWS, QUERIES, 7, EXCLUDE)
    split = QUERIES.reshape(2, 3, D), EXCLUDE.reshape(2, 3, 4)
    over = jax.jit(jax.vmap(functools.partial(of_dense, block=16), in_axes=(None, 0, 0)))
    equal((x.reshape(6, 7) for x in over(STATE, *split)), want)
    equal((x.reshape(6, 7) for x in of_dense(STATE, *split)), want)
    equal(of_dense(STATE, QUERIES[0], EXCLUDE[0]), (x[0] for x in want))
    equal(of_dense(STATE, QUERIES, EXCLUDE, block=2**40), want)
    assert of_dense(STATE, QUERIES[:0], EXCLUDE[:0])[1].shape == (0, 7)
    equal(of_dense(STATE, QUERIES[:2], [[], []]), of_dense(STATE, QUERIES[:2]))

    def loss(state, queries):
        scores, _ = of_dense(state, queries)
        return jnp.sum(scores)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(STATE, QUERIES)
    assert not any(np.any(grad) for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize("kind", ["dense", "train"])
def test_export_with_a_symbolic_batch(kind):
    table = DENSE if kind == "dense" else jax_tt.tt_table(N, D, tt_ranks=2)
    state = STATE if kind == "dense" else table.init(jax.random.key(0))
    call = jax.jit(lambda *args: jax_tt.top_k(table, *args[:2], 7, exclude=args[2], block=16))
    b, e = jax.export.symbolic_shape("b, e")
    shapes = jax.ShapeDtypeStruct((b, D), jnp.float32), jax.ShapeDtypeStruct((b, e), jnp.int32)
    exported = jax.export.export(call, disabled_checks=jax_tt.export.checks())(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), *shapes
    )
    loaded = jax.export.deserialize(exported.serialize())
    for count in (6, 1):
        args = QUERIES[:count], EXCLUDE[:count].astype(np.int32)
        equal(loaded.call(state, *args), call(state, *args))


def test_of_a_share_of_the_best():
    """On the CPU, `approx_max_k` is exact; the order of equal scores is its own."""
    scores, ids = of_dense(STATE, QUERIES, EXCLUDE, recall_target=0.9, block=16)
    np.testing.assert_array_equal(scores, searched(ROWS, QUERIES, 7, EXCLUDE)[0])
    at = np.take_along_axis(QUERIES @ ROWS.T, np.asarray(ids), axis=1)
    np.testing.assert_array_equal(at, scores)


def test_layers():
    want = searched(ROWS, QUERIES, 7, EXCLUDE)
    layer = jax_tt.Embed(N, D, optimizer=jax_tt.optimizers.SGD(0.1), rngs=nnx.Rngs(0))
    layer.embedding[...] = jnp.asarray(ROWS)
    equal(
        nnx.jit(lambda layer, *a: layer.top_k(a[0], 7, exclude=a[1]))(layer, QUERIES, EXCLUDE), want
    )
    layer.sentinel[...] = jnp.float32(2)  # a table that was not stepped as a fused one is
    state = {name: getattr(layer, name)[...] for name in ("embedding", "sentinel", "step", "used")}
    _, ids = jax_tt.top_k(layer.table, state, QUERIES, 7, method="reference")
    assert (np.asarray(ids) == -1).all()

    embed = jax_tt.EmbedCollection({"a": DENSE}, {"x": jax_tt.Feature("a")}, rngs=nnx.Rngs(0))
    embed.tables["a"].embedding[...] = jnp.asarray(ROWS)
    equal(embed.tables["a"].top_k(QUERIES, 7, exclude=EXCLUDE), want)

    params = {"params": {"embedding": jnp.asarray(ROWS)}}
    of_linen = jax_tt.linen.TableEmbed(jax_tt.dense_table(N, D))
    equal(of_linen.apply(params, QUERIES, 7, exclude=EXCLUDE, method="top_k"), want)
    collection = jax_tt.linen.EmbedCollection({"a": DENSE}, {"x": jax_tt.Feature("a")})
    params = {"params": {"a": params["params"]}}
    equal(collection.apply(params, "a", QUERIES, 7, exclude=EXCLUDE, method="top_k"), want)
    with pytest.raises(ValueError, match="table: got 'b'; expected one of a"):
        collection.apply(params, "b", QUERIES, 7, method="top_k")


PLACEMENTS = {
    "rows": jax_tt.Placement.round_robin(),
    "pages": jax_tt.Placement.pages([(0, 1), 1, 0, (1, 0), 1, 0, 1], 10),
    "hashed": jax_tt.Placement.hashed(),
    "one device": jax_tt.Placement.on(1),
    "replicas": jax_tt.Placement.replicated(),
    "columns": jax_tt.Placement.columns(2),
}


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_of_sharded_tables(placement, axes):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axes,) * 2)
    table = jax_tt.tables.ShardedTable(DENSE, mesh, "model", PLACEMENTS[placement])
    with jax.set_mesh(mesh):
        state = table.of_rows(STATE)
        batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        run = jax.jit(lambda *args: jax_tt.top_k(table, *args[:2], 7, exclude=args[2], block=8))
        compiled = run.lower(state, jax.device_put(QUERIES, batch), EXCLUDE).compile()
        equal(
            compiled(state, jax.device_put(QUERIES, batch), EXCLUDE),
            searched(ROWS, QUERIES, 7, EXCLUDE),
        )
    if placement != "columns":
        gathers = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
        assert all(np.prod([int(n) for n in one.split(",")]) <= 6 * 2 * 7 * 2 for one in gathers)


@pytest.mark.parametrize("method", ["reference", "auto"])
@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_rows_that_users_shard_are_not_gathered(kind, method):
    rows = RNG.integers(0, 3, (4 * 4096, D)).astype(np.float32)
    rows[:, 0], rows[:, 1] = 0, 255  # levels of int8 are whole numbers
    table, state = jax_tt.quantize(rows) if kind == "int8" else jax_tt.tables.DenseTable.of(rows)
    state = state if kind == "int8" else {"embedding": state}
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    on = functools.partial(jax.sharding.NamedSharding, mesh)
    state = jax.device_put(state, on(jax.sharding.PartitionSpec("model")))
    queries = jax.device_put(QUERIES, on(jax.sharding.PartitionSpec("data")))
    exclude = RNG.integers(-1, len(rows), (6, 4))
    program = functools.partial(jax_tt.top_k, table, k=7, block=512, method=method)
    run = jax.jit(program).lower(state, queries, exclude=exclude).compile()
    equal(run(state, queries, exclude=exclude), searched(rows, QUERIES, 7, exclude))
    assert run.memory_analysis().temp_size_in_bytes < len(rows) * D


@functools.cache
def keyed(capacity):
    """A hash table, its state, keys in ascending order as unsigned integers, and their rows."""
    table = jax_tt.hash_table(capacity, D)
    keys = np.random.default_rng(3).integers(-(2**62), 2**62, 40)
    keys[:2] = -1, 0
    _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), keys)
    rows = np.random.default_rng(4).integers(-1, 2, (capacity, D)).astype(np.float32)
    state = {**state, "embedding": jnp.asarray(rows)}
    keys = np.sort(keys.astype(np.uint64)).astype(np.int64)
    return table, state, keys, jax_tt.lookup(table, state, jax_tt.dynamic.split_keys(keys))[0]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("k", [40, 50])
def test_keys_of_hash_tables(k, devices):
    table, state, keys, rows = keyed(64)
    places = np.random.default_rng(5).integers(-1, 39, (6, 3))  # the last key is -1, as padding
    exclude = jax_tt.dynamic.split_keys(np.where(places < 0, -1, keys[places]))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("model",))
        table = jax_tt.tables.ShardedTable(table, mesh, "model", jax_tt.Placement.hashed())
        state = table.of_rows(state)

    @jax.jit
    def run(*args):
        given = functools.partial(jax_tt.top_k, table, *args[:2], k, exclude=args[2], block=16)
        return given(), given(method="reference")

    want, at = searched(rows, QUERIES, k, places)
    wanted = jax_tt.dynamic.split_keys(np.where(at < 0, -1, keys[at])).digits
    for scores, found in run(state, QUERIES, exclude):
        np.testing.assert_array_equal(scores, want)
        np.testing.assert_array_equal(found.digits, wanted)


def kinds_to_measure():
    rows = 20_000
    order = jax_tt.order.IdOrder(np.random.default_rng(1).permutation(rows))
    train = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(rows, 32, ranks=8))
    coded = jax_tt.coded_table(rows, 32, num_codes=4, bits=8)
    dense, hashed = jax_tt.dense_table(rows, 32), jax_tt.hash_table(rows, 32)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    shard = functools.partial(jax_tt.tables.ShardedTable, mesh=mesh, axis="model")
    return {
        "dense": dense,
        "bfloat16": jax_tt.dense_table(rows, 32, param_dtype=jnp.bfloat16),
        "train": train,
        "int8": jax_tt.quantized_table(rows, 32, bits=8),
        "int3": jax_tt.quantized_table(rows, 32, bits=3),
        "product codes": coded,
        "additive codes": jax_tt.coded_table(rows, 32, num_codes=3, bits=8, kind="additive"),
        "rotated codes": jax_tt.coded_table(rows, 32, num_codes=4, bits=8, rotated=True),
        "sum": jax_tt.tables.SumTable((train, jax_tt.tables.OrderedTable(coded, order))),
        "mixed": jax_tt.tables.MixedTable(
            (
                jax_tt.dense_table(rows // 4, 32),
                jax_tt.coded_table(rows - rows // 4, 32, num_codes=4, bits=8),
            )
        ),
        "ordered": jax_tt.tables.OrderedTable(train, order),
        "cached": jax_tt.tables.RowCachedTable(train, jax_tt.RowCache(1000, ways=5)),
        "hash": hashed,
        "hash of a train": jax_tt.tables.HashTable(train),
        "sharded": shard(dense, placement=jax_tt.Placement.round_robin()),
        "sharded hash": shard(hashed, placement=jax_tt.Placement.hashed()),
        "columns": shard(dense, placement=jax_tt.Placement.columns(4)),
    }


KINDS = kinds_to_measure()


@pytest.mark.optimized
@pytest.mark.skipif(not native_available(), reason="needs the CPU module")
@pytest.mark.parametrize("method", ["auto", "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_neither_the_dense_table_nor_all_scores_exist(name, method):
    """The scores and rows of a block, these once more where they are made of others; a byte for each slot of keys.

    The reference of a train also has the slices of its cores that the rows of a block are products of.
    """
    table, batch, block = KINDS[name], 16, 512
    state = jax.jit(table.init)(jax.random.key(0))
    ids = np.full((batch, 4), -1)
    exclude = jax_tt.dynamic.split_keys(ids) if table.ids.takes_keys else ids
    queries = np.ones((batch, 32), np.float32)
    run = jax.jit(
        lambda *args: jax_tt.top_k(
            table, *args[:2], 10, exclude=args[2], block=block, method=method
        )
    )
    compiled = run.lower(state, queries, exclude).compile()
    rows, scores = 4 * 32 * block, 4 * batch * block
    slots = table.num_embeddings if table.ids.takes_keys else 0
    pages = 2 * state["page_table"].nbytes if name == "sharded" else 0  # its inverse
    tables = len(getattr(table, "tables", ()))
    trains = ("train", "sum", "ordered", "cached", "hash of a train")
    cores = KINDS["train"].spec.param_shapes.values() if name in trains else ()
    slices = 4 * block * sum(np.prod(shape[1:]) for shape in cores) * (method == "reference")
    most = scores + (2 + tables) * rows + slots + pages + slices + 20_000
    all_scores = 4 * batch * table.num_embeddings
    assert compiled.memory_analysis().temp_size_in_bytes <= most
    assert most < all_scores / (1 if slices else 2)


def test_errors():
    for changes, message in (
        ({"k": 0}, "k: got 0; expected an integer >= 1"),
        ({"k": 2.5}, "k: got 2.5 of type float"),
        ({"block": 0}, "block: got 0; expected an integer >= 1"),
        ({"recall_target": 1.5}, r"recall_target: got 1.5; expected None or a number in \(0, 1\)"),
        (
            {"queries": np.ones((2, D + 1))},
            rf"queries: got .*shape \(2, {D + 1}\); expected \[..., {D}\]",
        ),
        ({"queries": np.ones((2, D), np.int32)}, "queries: got int32 .*; expected floats"),
        ({"exclude": [[0, N], [1, 2]]}, f"exclude: got the id {N}; expected 0 to {N - 1}"),
        ({"exclude": [[0, -2], [1, 2]]}, "exclude: got the id -2"),
        ({"exclude": [1, 2]}, r"exclude: got .*shape \(2,\); expected \[2, E\]"),
        ({"exclude": [[0.5], [1]]}, "exclude: got dtype float64; expected integers"),
        ({"exclude": jax_tt.dynamic.split_keys([[1], [2]])}, "exclude: got SplitIds"),
        ({"method": "fast"}, "method"),
        ({"state": {}}, "state: has no embedding"),
    ):
        given = {"state": STATE, "queries": np.ones((2, D), np.float32), "k": 3} | changes
        with pytest.raises((ValueError, TypeError), match=message):
            jax_tt.top_k(DENSE, **given)
