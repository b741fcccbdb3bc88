"""TT tables of the shapes with GPU kernels of their own: full and partly filled tiles, several parts of a slice."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.conftest import WAYS, method_fixture, native_available
from tests.helpers import assert_close, assert_same_in_any_order, core_gradients, dense_table

# Row factors: what a slice of the middle core is shared by.  "many": more rows than a part holds, some of which share
# their left core too; "lone": hardly any two rows share anything.
ROWS = {"many": (7, 2, 11), "lone": (6, 8, 9), "pairs": (40, 1, 2)}
# Columns and rank: of every rank those whose left side is contracted first, and those whose right side is.
SHAPES = [
    ((4, 4, 8), 16),
    ((8, 4, 2), 16),
    ((2, 8, 4), 16),
    ((4, 4, 4), 32),
    ((2, 2, 4), 32),
    ((4, 8, 2), 32),
    ((2, 4, 8), 64),
    ((4, 2, 2), 64),
    ((4, 2, 8), 128),
    ((8, 2, 4), 128),
]

# The reference has no tiles: it is what the others are held to.
method = method_fixture(*WAYS[2:])


def _case(columns, rank, rows, dtype, seed=0, ids=None):
    rng = np.random.default_rng(seed)
    size = math.prod(rows)
    shape = jax_tt.TTShape(size - 1, math.prod(columns), (rank, rank), rows, columns)
    # Ranks are clipped to what the factors can have; the cores of a test need not be.
    edges = (1, rank, rank, 1)
    cores = tuple(
        jnp.asarray(
            rng.normal(size=(rows[k], edges[k], columns[k], edges[k + 1])) / edges[k] ** 0.5, dtype
        )
        for k in range(3)
    )
    if ids is None:
        ids = rng.integers(0, shape.num_embeddings, 230).astype(np.int32)
        ids[rng.integers(0, len(ids), 5)] = [-3, size, 0, size - 2, 2**31 - 1]
    else:
        ids = rng.permutation(ids)
    n = len(ids)
    weights = rng.normal(size=n).astype(np.float32)
    cuts = np.sort(rng.integers(0, n + 1, 20))
    bags = jax_tt.Bags.from_offsets(
        ids, np.concatenate([[0], cuts, [n]]), weights, include_last_offset=True
    )
    g = rng.normal(size=(21, shape.features)).astype(np.float32)
    bag_of = np.searchsorted(cuts, np.arange(n), side="right")
    return cores, bags, ids, weights, bag_of, g


def _run(cores, bags, g, method):
    n = math.prod(core.shape[0] for core in cores) - 1

    @jax.jit
    def step(cores, weights):
        def loss(cores, weights):
            given = jax_tt.Bags(bags.ids, bags.offsets, weights)
            out = jax_tt.tt.embed_bag(
                cores, given, num_embeddings=n, bounds="zero", method=method
            ).astype(jnp.float32)
            return jnp.sum(out * g), out

        (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(cores, weights)
        return out, gradients

    return step(cores, bags.weights)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_gradients(shape, rows, method):
    _check(*_case(*shape, ROWS[rows], jnp.float32), method, 2e-6)


@pytest.mark.parametrize("shape", [((2, 4, 4), 16), ((8, 8, 2), 32), ((4, 4, 2), 128)], ids=str)
def test_rows_of_many_positions(shape, method):
    """One thread adds up a row of up to 8 positions, a block a longer one, 512 or 1,024 positions at a time."""
    counts = {0: 1, 1: 8, 2: 9, 12: 513, 13: 1030, 100: 7}
    ids = np.repeat(list(counts), list(counts.values())).astype(np.int32)
    _check(*_case(*shape, ROWS["many"], jnp.float32, ids=ids), method, 4e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "shape", [((4, 8, 4), 16), ((8, 2, 8), 32), ((8, 4, 2), 64), ((4, 2, 8), 128)], ids=str
)
def test_narrow_storage(shape, dtype, method):
    _check(*_case(*shape, ROWS["many"], dtype), method, 1e-2)


@pytest.mark.parametrize(
    "shape", [((4, 8, 2), 16), ((2, 2, 4), 32), ((2, 4, 8), 64), ((4, 2, 8), 128)], ids=str
)
def test_tensor_float32_where_it_is_allowed(shape, method):
    case = _case(*shape, ROWS["many"], jnp.float32)
    cores, bags, *_ = case
    n = math.prod(ROWS["many"]) - 1
    rows = functools.partial(jax_tt.tt.embed_bag, num_embeddings=n, bounds="zero", method=method)
    exact = jax.jit(rows)(cores, bags)
    with jax.default_matmul_precision("tensorfloat32"):
        rounded = _check(*case, method, 2e-3)
    assert np.any(exact != rounded), "products as exact as before"


def _check(cores, bags, ids, weights, bag_of, g, method, tolerance):
    """The rows that it computes."""
    size = math.prod(core.shape[0] for core in cores)
    out, (dcores, dweights) = _run(cores, bags, g, method)
    table = dense_table(cores, size)
    valid = (ids >= 0) & (ids < size - 1)
    expected, dtable = np.zeros(g.shape), np.zeros_like(table)
    safe = np.where(valid, ids, 0)
    scale = np.where(valid, np.asarray(weights, np.float64), 0)
    np.add.at(expected, bag_of, scale[:, None] * table[safe])
    np.add.at(dtable, safe, scale[:, None] * g[bag_of])
    assert_close(out, expected, tolerance, "rows")
    for k, want in enumerate(core_gradients(cores, dtable)):
        assert_close(dcores[k], want, tolerance, f"gradient of core {k}")
    dots = np.where(valid, np.sum(table[safe] * g[bag_of], axis=1), 0)
    assert_close(dweights, dots, tolerance, "gradient of the weights")
    return out


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="the emulator is not built")
def test_order_of_threads_leaves_no_trace():
    cores, bags, *_, g = _case((4, 8, 4), 32, ROWS["many"], jnp.float32)
    assert_same_in_any_order(lambda: _run(cores, bags, g, "cuda_emulated"))


@pytest.mark.slow
@pytest.mark.dear("a chunk has 32,768 rows at least")
def test_more_rows_than_a_chunk():
    """The buffers of 33,000 rows of rank 32 take more memory than a chunk has: they are worked on in two."""
    rng = np.random.default_rng(0)
    ids = rng.choice(39_999, 33_000, replace=False)
    ids = np.concatenate([ids, np.repeat(ids[:30], 20)]).astype(np.int32)
    case = _case((8, 2, 8), 32, (20, 10, 200), jnp.bfloat16, ids=ids)
    found, expected = (_run(*case[:2], case[-1], way) for way in ("cuda_emulated", "native"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 2e-2, "of two chunks")
