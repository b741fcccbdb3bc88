"""`top_k_agreement`: how many of the best rows for some queries a smaller table finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_positive, expect
from jax_tt._base.rows_of_arrays import dense_table
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._ops.top_k import top_k
from jax_tt._table.state import State
from jax_tt._table.table import Table


def top_k_agreement(rows: Any, queries: Any, k: int) -> Callable[[Table, State], float]:
    """A metric for `jax_tt.compress`: the share of the best rows that a table has among its best ones.

    Args:
        rows: ``[N, D]``, the trained rows.
        queries: floats ``[B, D]`` that are like those to come, e.g. vectors of the users of a day.
        k: the number of best rows by inner product, see `jax_tt.top_k`.

    Returns:
        A function ``(table, state) -> number`` between 0 and 1, the mean over the queries.

    >>> import jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    >>> metric = jax_tt.compression.top_k_agreement(rows, rows[:50], k=10)
    >>> found = jax_tt.compress(rows, kind="quantized", min_quality=0.9, metric=metric, progress=False)
    >>> found.chosen.quality >= 0.9
    True
    """
    rows = np.asarray(dense_table(rows, "rows"), np.float32)
    vectors = jnp.asarray(queries)
    k = min(as_positive("k", k), rows.shape[0])

    def best(table: Table, state: State) -> np.ndarray:
        _, ids = top_k(table, state, vectors, k)
        return np.asarray(ids).reshape(-1, k)

    of_rows = best(DenseTable(*rows.shape), {"embedding": jnp.asarray(rows)})
    expect(of_rows.size, "queries", vectors, "at least one query")

    def agreement(table: Table, state: State) -> float:
        pairs = zip(best(table, state), of_rows, strict=True)
        return sum(np.isin(found, wanted).sum() for found, wanted in pairs) / of_rows.size

    return agreement
