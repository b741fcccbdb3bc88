"""`jax_tt.functional`: operations on dense arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_int, mismatch
from jax_tt._ids.bags import Bags
from jax_tt._ids.id_space import IdSpace, outside
from jax_tt._ids.inputs import bag_batch, lookup_batch
from jax_tt._ids.offsets import Treatment, entered_batches
from jax_tt._ids.split_ids import SplitIds
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._lookup.rows import pooled_rows
from jax_tt._table.options import DEFAULT_BOUNDS, Lookup
from jax_tt._tt.shape import TTShape


def count_out_of_range(ids_or_bags: Any, num_embeddings: int | TTShape) -> jax.Array:
    """Number of ids outside ``[0, num_embeddings)``; padding and unused capacity do not count.

    Args:
        ids_or_bags: integers of any shape, `SplitIds` or `Bags`.
        num_embeddings: rows of the table, or its `TTShape`, which split ids need.

    Returns:
        int32 scalar; under ``vmap``, one per example. Works under ``jit``.

    Raises:
        TypeError: split ids with a number of rows.
        ValueError: an argument does not fit, or traced 32-bit ids for more rows than 32 bits can address.

    >>> import jax_tt
    >>> int(jax_tt.functional.count_out_of_range(jax_tt.Bags.from_ragged([[1, 12], [-3]]), 10))
    2
    """
    space = _space(ids_or_bags, num_embeddings)
    if isinstance(ids_or_bags, Bags):
        batch, _ = bag_batch(space, ids_or_bags, jnp.float32)
        (batch,), _ = entered_batches([batch], ["bags.offsets"], Treatment("zero"))
    else:
        batch, _ = lookup_batch(space, ids_or_bags)
    return jnp.sum(outside(space, batch), dtype=jnp.int32)


def _space(ids_or_bags: Any, num_embeddings: int | TTShape) -> IdSpace:
    given = ids_or_bags.ids if isinstance(ids_or_bags, Bags) else ids_or_bags
    if isinstance(num_embeddings, TTShape):
        return IdSpace(num_embeddings.num_embeddings, num_embeddings.row_factors)
    if isinstance(given, SplitIds):
        got = f"{num_embeddings!r} for SplitIds"
        expected = "the TTShape that they were split with, which knows the rows of every digit"
        raise mismatch("num_embeddings", got, expected, error=TypeError)
    rows = as_int("num_embeddings", num_embeddings, 1, 2**63 - 1)
    # The factors are arbitrary; they are used to split ids that do not fit into 32 bits.
    return IdSpace(rows, (-(-rows // 2**60), 2**30, 2**30))


def embed_bag(
    table: jax.Array,
    bags: Bags | Any,
    *,
    combiner: str = "sum",
    bounds: str = DEFAULT_BOUNDS,
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
