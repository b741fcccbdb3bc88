"""Inner products of queries with every row of a table."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_array, as_dtype
from jax_tt._base.dtypes import resolve_precision, widest
from jax_tt._table import whole
from jax_tt._table.table import Table
from jax_tt._table.types import State


def attend(
    table: Table,
    state: State,
    query: Any,
    dtype: Any = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """``query @ rows.T`` for the rows of a table.

    Args:
        table: of any kind.
        state: its arrays by name.
        query: floats ``[..., D]``.
        dtype: type of the result; default the wider type of ``query`` and the parameters.
        precision: of the products.

    Returns:
        ``[..., N]``.

    >>> import jax, jax_tt
    >>> table = jax_tt.dense_table(1000, 8)
    >>> jax_tt.tables.attend(table, table.init(jax.random.key(0)), jax.numpy.ones((5, 8))).shape
    (5, 1000)
    """
    precision = resolve_precision(precision)
    query = as_array("query", query)
    if query.ndim == 0 or query.shape[-1] != table.features:
        raise ValueError(
            f"query: got shape {query.shape}; expected [..., {table.features}], the table's features last."
        )
    if not jnp.issubdtype(query.dtype, jnp.floating):
        raise ValueError(f"query: got dtype {query.dtype}; expected floats.")
    query = jnp.asarray(query)
    flat = query.reshape(math.prod(query.shape[:-1]), table.features)
    scores = whole.attend(table, state, flat, precision)
    scores = scores.reshape(*query.shape[:-1], table.num_embeddings)
    return scores.astype(as_dtype("dtype", dtype, widest(query.dtype, table.spec.storage(state))))
