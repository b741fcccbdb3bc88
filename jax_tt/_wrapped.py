"""Tensor-train tables with their wrappers."""

from __future__ import annotations

from typing import Any

from jax_tt._cache.cached import RowCachedTable
from jax_tt._cache.config import RowCache
from jax_tt._shape import TTShape
from jax_tt._tables.table import Table
from jax_tt._tables.tensor_train import TTTable
from jax_tt.order import IdOrder
from jax_tt.order._ordered import OrderedTable


def described_tt(
    shape: TTShape, cache: RowCache | None, id_order: IdOrder | None, **fields: Any
) -> Table:
    """The table of a `TTShape`, wrapped in its row cache and its order of ids.

    Args:
        shape: its sizes.
        cache, id_order: as in `jax_tt.TTEmbed`.
        **fields: the other fields of `TTTable`.
    """
    table: Table = TTTable.of_shape(shape, **fields)
    if cache is not None:
        table = RowCachedTable(table, cache)
    return table if id_order is None else OrderedTable(table, id_order)
