"""`embed_bag`: pooled rows of a dense table."""

from typing import Any

import jax

from jax_tt._arguments import as_dtype
from jax_tt._bags import Bags
from jax_tt._dtypes import accumulator
from jax_tt._ops._canonical import check_combiner, dense_table
from jax_tt._ops._combine import batch_to_sum, combine
from jax_tt._ops._dispatch import pooled_sum
from jax_tt._ops._inputs import bag_batch


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
    """`tt_embed_bag` for a dense table.

    Args:
        table: ``[N, D]``.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
        combiner, bounds, dtype, method, axis_name, name: as in `tt_embed_bag`.

    Returns:
        ``[B, D]``. Differentiable in the table (a dense gradient) and in ``bags.weights``.

    >>> import jax.numpy as jnp, jax_tt
    >>> table = jnp.arange(6.0).reshape(3, 2)
    >>> bags = jax_tt.Bags.from_ragged([[0, 2], []])
    >>> jax_tt.embed_bag(table, bags, method="reference").tolist()
    [[4.0, 6.0], [0.0, 0.0]]
    """
    check_combiner(combiner)
    spec, table = dense_table(table, bounds, name)
    spec, batch, count = bag_batch(spec, bags, accumulator(table.dtype))
    result_type = as_dtype("dtype", dtype, table.dtype)
    sums = pooled_sum(spec, (table,), batch_to_sum(combiner, spec, batch), method, axis_name)
    result = combine(combiner, spec, batch, sums)
    return result.reshape(count, spec.features).astype(result_type)
