"""What becomes of a table with an order of ids that grows, is reordered, or gets another cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_tt._directories.row_cache import RowCache
from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._ids.stored_order import on_device
from jax_tt._kinds.ordered.table import OrderedTable
from jax_tt._table.change import Change, Growth, Orders, grow, reorder, under_order, with_cache
from jax_tt._table.copies import register_wrapper, without_values
from jax_tt._table.state import State
from jax_tt._table.table import Table

register_wrapper(OrderedTable)


@without_values.register(OrderedTable)
def without_order(table: OrderedTable) -> OrderedTable:
    return dataclasses.replace(table, table=without_values(table.table), id_order=None)


@grow.register(OrderedTable)
def grown(table: OrderedTable, state: State, growth: Growth) -> Change:
    order = IdOrder(state[ID_ORDER])
    if growth.like is not None:
        growth = growth._replace(like=order.apply(np.asarray(growth.like)))
    change = grow(table.table, _of_table(state), growth)
    return ordered(table, change, order.grow(growth.num_embeddings))


@reorder.register(OrderedTable)
def reordered(table: OrderedTable, state: State, orders: Orders) -> Change:
    inner = orders._replace(old=IdOrder(state[ID_ORDER]))
    return ordered(table, reorder(table.table, _of_table(state), inner), orders.new)


@with_cache.register(OrderedTable)
def cached_anew(table: OrderedTable, state: State, cache: RowCache, method: str) -> Change:
    change = with_cache(table.table, _of_table(state), cache, method)
    return ordered(table, change, IdOrder(state[ID_ORDER]))


@under_order.register(Table)
def ordered(table: Table, change: Change, id_order: IdOrder) -> Change:
    """A changed table with an order of ids."""
    del table
    state = {**change.state, ID_ORDER: on_device(id_order.rows)}
    return dataclasses.replace(change, table=OrderedTable(change.table, id_order), state=state)


def _of_table(state: State) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != ID_ORDER}
