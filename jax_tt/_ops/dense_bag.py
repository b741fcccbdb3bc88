"""`embed_bag`: pooled rows of a dense table."""

from typing import Any

import jax

from jax_tt._ids.bags import Bags
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._lookup.calls import pooled_rows
from jax_tt._table.options import Lookup


def embed_bag(
    table: jax.Array,
    bags: Bags | Any,
    *,
    combiner: str = "sum",
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
) -> jax.Array:
    """`tt.embed_bag` for a dense table.

    Args:
        table: ``[N, D]``.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
        combiner, bounds, dtype, method, axis_name, name: as in `tt.embed_bag`.

    Returns:
        ``[B, D]``. Differentiable in the table (a dense gradient) and in ``bags.weights``.

    >>> import jax.numpy as jnp, jax_tt
    >>> table = jnp.arange(6.0).reshape(3, 2)
    >>> bags = jax_tt.Bags.from_ragged([[0, 2], []])
    >>> jax_tt.functional.embed_bag(table, bags, method="reference").tolist()
    [[4.0, 6.0], [0.0, 0.0]]
    """
    lookup = Lookup(combiner, bounds, dtype, None, method, axis_name)
    dense, rows = DenseTable.of(table, name=name)
    return pooled_rows(dense, {"embedding": rows}, bags, lookup)[0]
