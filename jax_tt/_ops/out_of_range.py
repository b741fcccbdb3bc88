"""`count_out_of_range`: how many ids of a batch fall outside a table."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._arguments import as_int
from jax_tt._bags import Bags
from jax_tt._ops._batch import present
from jax_tt._ops._ids import digits_in_range
from jax_tt._ops._inputs import bag_batch, lookup_batch
from jax_tt._ops._spec import DenseSpec, TTSpec
from jax_tt._shape import TTShape


def count_out_of_range(ids_or_bags: Any, num_embeddings: int | TTShape) -> jax.Array:
    """Number of ids outside ``[0, num_embeddings)``; padding and unused capacity do not count.

    Args:
        ids_or_bags: integers of any shape, `SplitIds` or `Bags`.
        num_embeddings: rows of the table, or its `TTShape` (needed for split ids).

    Returns:
        int32 scalar. Works under ``jit``, so a host can look at it now and then.

    >>> import jax_tt
    >>> int(jax_tt.count_out_of_range(jax_tt.Bags.from_ragged([[1, 12], [-3]]), 10))
    2
    """
    spec: TTSpec | DenseSpec
    if isinstance(num_embeddings, TTShape):
        shape = num_embeddings
        spec = TTSpec(
            shape.row_factors,
            shape.col_factors,
            shape.full_ranks,
            shape.num_embeddings,
            "clip",
            False,
            None,
        )
    else:
        rows = as_int("num_embeddings", num_embeddings)
        if rows < 1:
            raise ValueError(f"num_embeddings: got {rows}; expected at least 1.")
        spec = DenseSpec(rows, 1, "clip", False, None)
    if isinstance(ids_or_bags, Bags):
        spec, batch, _ = bag_batch(spec, ids_or_bags, jnp.float32)
    else:
        batch, _ = lookup_batch(spec, ids_or_bags)
    outside = present(batch) & ~digits_in_range(spec, batch)[1]
    return jnp.sum(outside, dtype=jnp.int32)
