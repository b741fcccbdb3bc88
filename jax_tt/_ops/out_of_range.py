"""The number of ids of a batch that are out of range."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_positive
from jax_tt._ids.bags import Bags
from jax_tt._ids.batch import Batch
from jax_tt._ids.split_ids import SplitIds
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._table.ids import outside
from jax_tt._table.inputs import bag_batch, lookup_batch
from jax_tt._table.table import Table
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
    >>> int(jax_tt.count_out_of_range(jax_tt.Bags.from_ragged([[1, 12], [-3]]), 10))
    2
    """
    table = _table(ids_or_bags, num_embeddings)
    return jnp.sum(outside(table, _batch(table, ids_or_bags)), dtype=jnp.int32)


def _table(ids_or_bags: Any, num_embeddings: int | TTShape) -> TTTable:
    given = ids_or_bags.ids if isinstance(ids_or_bags, Bags) else ids_or_bags
    if isinstance(num_embeddings, TTShape):
        return _sizes(num_embeddings.num_embeddings, num_embeddings.row_factors)
    if isinstance(given, SplitIds):
        raise TypeError(
            f"num_embeddings: got {num_embeddings!r} for SplitIds; expected the TTShape that they were split with, "
            "which says how many rows each digit counts."
        )
    rows = as_positive("num_embeddings", num_embeddings)
    if rows >= 2**63:
        raise ValueError(f"num_embeddings: got {rows}; expected less than 2**63.")
    # The factors are arbitrary; they are used to split ids that do not fit into 32 bits.
    return _sizes(rows, (-(-rows // 2**60), 2**30, 2**30))


def _sizes(rows: int, radices: tuple[int, ...], name: str | None = None) -> TTTable:
    """A table of these sizes with a single column, to compare ids with."""
    ones = (1,) * len(radices)
    return TTTable(rows, radices, ones, (1, *ones), name=name)


def _batch(table: Table, ids_or_bags: Any) -> Batch:
    if isinstance(ids_or_bags, Bags):
        return bag_batch(table, ids_or_bags, jnp.float32)[0]
    return lookup_batch(table, ids_or_bags)[0]
