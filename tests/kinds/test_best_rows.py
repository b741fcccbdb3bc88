"""Native scans for the best rows, in the sizes at which their kernels differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._base import ffi
from tests.helpers import to_dense
from tests.lookup.test_top_k import searched

pytestmark = pytest.mark.skipif(not ffi.available("cpu"), reason="has no native operations")

CODES = {
    "bytes": {"num_codes": 4, "bits": 8},
    "half bytes": {"num_codes": 4, "bits": 4},
    "many half bytes": {"num_codes": 24, "bits": 4, "kind": "additive"},
    "sums": {"num_codes": 8, "bits": 4, "terms": 2},
    "hot": {"num_codes": 4, "bits": 4, "hot": 20, "hot_terms": 1},
    "wide codes": {"num_codes": 2, "bits": 9},
}


def whole_numbers(table, seed=0):
    """A state whose rows are small integers, so that scores are exact and many of them equal."""
    rng = np.random.default_rng(seed)
    state = jax.jit(table.init)(jax.random.key(seed))
    return {
        name: jnp.asarray(rng.integers(-2, 3, array.shape).astype(array.dtype))
        if jnp.issubdtype(array.dtype, jnp.floating) and array.ndim > 1
        else array
        for name, array in state.items()
    }


def check(table, state, queries, k, exclude=None):
    rows = np.asarray(to_dense(table, state))
    found = jax_tt.top_k(table, state, queries, k, exclude=exclude, method="native")
    for got, want in zip(found, searched(rows, queries, k, exclude), strict=True):
        np.testing.assert_array_equal(got, want)


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows, features", [(1, 1), (50, 5), (700, 16), (333, 48)])
def test_arrays(rows, features, dtype):
    table = jax_tt.dense_table(rows, features, param_dtype=jnp.dtype(dtype))
    state = whole_numbers(table)
    for queries, k in ((0, 3), (1, 1), (2, 40), (3, 7), (20, 5), (70, 9)):
        exclude = np.random.default_rng(k).integers(-1, rows, (queries, 3))
        check(table, state, integers(queries, features), k, exclude)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("features", [3, 16, 48, 50])
def test_packed_rows(bits, features):
    rows = np.random.default_rng(0).integers(0, 4, (300, features)).astype(np.float32)
    rows[:, 0], rows[:, 1] = 0, 3 if bits == 2 else (1 << bits) - 1  # levels are whole numbers
    table, state = jax_tt.quantize(rows, bits=bits)
    for queries, k in ((1, 9), (2, 30), (4, 7), (5, 400), (33, 20)):
        exclude = np.random.default_rng(k).integers(-1, 300, (queries, 3))
        check(table, state, integers(queries, features), k, exclude)


@pytest.mark.parametrize("bits", [4, 2])
def test_packed_rows_of_fitted_levels(bits):
    rows = np.random.default_rng(0).standard_normal((100, 32)).astype(np.float32)
    table, state = jax_tt.quantize(rows, bits=bits, levels="fit")
    queries = np.random.default_rng(1).standard_normal((1, 32)).astype(np.float32)
    found = jax_tt.top_k(table, state, queries, 100, method="native")
    want = searched(to_dense(table, state), queries, 100)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], want[1])


@pytest.mark.parametrize("codes", CODES)
def test_codes(codes):
    table = jax_tt.coded_table(400, 8, **CODES[codes])
    state = whole_numbers(table)
    for queries, k in ((1, 9), (2, 500), (3, 5), (40, 20)):
        exclude = np.random.default_rng(k).integers(-1, 400, (queries, 3))
        check(table, state, integers(queries, 8), k, exclude)


def test_the_threads_of_a_large_table_agree():
    table = jax_tt.dense_table(30_000, 16)
    state = whole_numbers(table)
    rows = np.array(state["embedding"])
    rows[::1000], rows[1], rows[2] = 2, np.nan, np.inf
    state = {"embedding": jnp.asarray(rows)}
    queries = np.abs(integers(40, 16)) + 1
    check(table, state, queries, 100)
    queries[3, 5], queries[4] = np.nan, 0
    with np.errstate(invalid="ignore"):
        check(table, state, queries, 100)


@pytest.mark.parametrize(
    "table",
    [
        jax_tt.coded_table(20_000, 8, num_codes=4, bits=4),
        jax_tt.coded_table(20_000, 8, num_codes=4, bits=8),
        jax_tt.tt_table(20_000, 8, tt_ranks=2),
    ],
    ids=["half bytes", "bytes", "train"],
)
def test_scores_of_zero_are_in_the_order_of_ids(table):
    """No number is just below 0 on threads that take subnormal ones for 0, as those of XLA do."""
    check(table, whole_numbers(table), np.zeros((2, 8), np.float32), 10)


@pytest.mark.parametrize(
    "rows, row_factors, col_factors, ranks",
    [
        (70, (7, 10), (2, 3), (4,)),
        (300, (70, 5), (4, 4), (3,)),
        (1000, (5, 70, 3), (2, 3, 4), (2, 5)),
        (60, (2, 2, 2, 2, 4), (1, 2, 1, 2, 1), (2, 2, 2, 2)),
    ],
)
def test_trains(rows, row_factors, col_factors, ranks):
    features = int(np.prod(col_factors))
    shape = jax_tt.TTShape(rows, features, ranks, row_factors, col_factors)
    table = jax_tt.tables.TTTable.of_shape(shape)
    state = whole_numbers(table)
    for queries, k in ((1, 9), (2, 1100), (11, 20)):
        exclude = np.random.default_rng(k).integers(-1, rows, (queries, 3))
        check(table, state, integers(queries, features), k, exclude)


@pytest.mark.parametrize("codes", [5, 16])
def test_bounds_of_codes_leave_out_no_row(codes):
    table = jax_tt.coded_table(20_000, 80, num_codes=codes, bits=4)
    state = jax.jit(table.init)(jax.random.key(1))
    state["codebooks"] = jax.random.normal(jax.random.key(2), state["codebooks"].shape)
    queries = np.random.default_rng(0).standard_normal((20, 80)).astype(np.float32)
    queries[1], queries[2, 3], queries[3, 0] = 0, np.nan, 1e30
    rows = np.asarray(to_dense(table, state))
    scores, ids = jax_tt.top_k(table, state, queries, 50, method="native")
    want, _ = searched(rows, queries, 50)
    np.testing.assert_allclose(scores, want, rtol=1e-4, atol=1e-4)
    best = np.take_along_axis(queries @ rows.T, np.asarray(ids), axis=1)
    np.testing.assert_allclose(np.delete(best, 2, 0), np.delete(scores, 2, 0), rtol=1e-4, atol=1e-4)
