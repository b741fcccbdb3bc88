"""`top_k` of every kind of table, compared with a search through all scores in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt

N, D = 61, 8
ORDER = jax_tt.order.IdOrder(np.random.default_rng(1).permutation(N))
TRAIN = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(N, D, ranks=3))
DENSE = jax_tt.dense_table(N, D)
CODED = jax_tt.coded_table(N, D, num_codes=4, bits=2)
QUANTIZED = {bits: jax_tt.quantized_table(N, D, bits=bits) for bits in (8, 4)}
MIXED = jax_tt.tables.MixedTable(
    (jax_tt.dense_table(20, D), jax_tt.coded_table(N - 20, D, num_codes=4, bits=2))
)
KINDS = {
    "dense": DENSE,
    "bfloat16": jax_tt.dense_table(N, D, param_dtype=jnp.bfloat16),
    "train": TRAIN,
    "int8": QUANTIZED[8],
    "int4": QUANTIZED[4],
    "product codes": CODED,
    "rotated codes": jax_tt.coded_table(N, D, num_codes=4, bits=2, rotated=True),
    "additive codes": jax_tt.coded_table(N, D, num_codes=3, bits=3, kind="additive"),
    "sum": jax_tt.tables.SumTable((TRAIN, jax_tt.tables.OrderedTable(CODED, ORDER))),
    "mixed": MIXED,
    "ordered": jax_tt.tables.OrderedTable(TRAIN, ORDER),
    "cached": jax_tt.tables.RowCachedTable(TRAIN, jax_tt.RowCache(10, ways=5)),
}


def searched(rows, queries, k, exclude=None):
    """Scores and ids from all scores in float64; rows without a score are -inf, in rows of NaN."""
    scores = np.asarray(queries, np.float64) @ np.asarray(rows, np.float64).T
    scores = np.where(np.isnan(scores), -np.inf, scores)
    for some, ids in zip(scores, () if exclude is None else exclude, strict=False):
        some[[i for i in ids if i >= 0]] = -np.inf
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, ids, axis=1)
    ids = np.where(scores == -np.inf, -1, ids)
    fill = [(0, 0), (0, max(0, k - ids.shape[1]))]
    return np.pad(scores, fill, constant_values=-np.inf), np.pad(ids, fill, constant_values=-1)


@functools.cache
def small_integers(name):
    """A state whose rows are small integers, so that scores are exact and many of them equal."""
    table, rng = KINDS[name], np.random.default_rng(0)
    state = jax.jit(table.init)(jax.random.key(0))
    if name.startswith("int"):
        rows = rng.integers(0, 3, (N, D)).astype(np.float32)
        return jax_tt.quantize(rows, bits=table.bits)[1]
    made = {}
    for each, array in state.items():
        if jnp.issubdtype(array.dtype, jnp.floating) and array.ndim > 1 and "rotation" not in each:
            made[each] = jnp.asarray(rng.integers(-1, 2, array.shape), array.dtype)
    return {**state, **made}


@functools.cache
def program(name, k, block, method):
    return jax.jit(
        lambda state, queries, exclude: jax_tt.top_k(
            KINDS[name], state, queries, k, exclude=exclude, block=block, method=method
        )
    )


@pytest.mark.parametrize("method", ["reference", "auto"])
@pytest.mark.parametrize("k, block", [(7, 16), (70, 13), (5, None)])
@pytest.mark.parametrize("name", KINDS)
def test_equals_a_search_through_all_scores(name, k, block, method):
    table, state = KINDS[name], small_integers(name)
    rng = np.random.default_rng(k)
    queries = rng.integers(-2, 3, (5, D)).astype(np.float32)
    queries[1] = 0  # all scores are equal
    queries[2, 3] = np.nan
    exclude = rng.integers(-1, N, (5, 4))
    exclude[0, 1:] = exclude[0, 0]
    rows = jax_tt.tables.to_dense(table, state)
    scores, ids = program(name, k, block, method)(state, queries, exclude)
    if "rotated" in name:  # scores are not exact
        rows = np.asarray(rows)
        want, _ = searched(rows, queries, k, exclude)
        np.testing.assert_allclose(scores, want, rtol=1e-5, atol=1e-5)
        return
    want = searched(rows, queries, k, exclude)
    np.testing.assert_array_equal(scores, want[0])
    np.testing.assert_array_equal(ids, want[1])
