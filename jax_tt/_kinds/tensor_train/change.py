"""What becomes of a tensor train that grows or is reordered."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._table.change import (
    Carry,
    Change,
    Growth,
    Orders,
    extended,
    grow,
    reorder,
    restarted,
    with_params,
)
from jax_tt._table.initial_rows import unboxed
from jax_tt._table.state import State
from jax_tt._tt.grow import tt_grow
from jax_tt._tt.initial_cores import fresh_init
from jax_tt._tt.reorder import check_cores, reordered_rows
from jax_tt._tt.rows import TrainRows


@grow.register(TTTable)
def grown(table: TTTable, state: State, growth: Growth) -> Change:
    """All cores but for the slices appended to the first are the same arrays."""
    shape = table.shape.grow(growth.num_embeddings)
    init = unboxed(fresh_init(table.core_init))
    cores = tt_grow(table.spec.params(state), shape, growth.key, init=init, like=growth.like)
    after = table.with_shape(shape)
    carry: dict[str, Carry] = {after.spec.param_names[0]: extended}
    return Change(
        after, {**state, **with_params(state, after, after.spec.named(cores), carry)}, carry
    )


@reorder.register(TTTable)
def reordered(table: TTTable, state: State, orders: Orders) -> Change:
    """Optimizer state of every core starts at the mean of what it was."""
    cores = table.spec.params(state)
    check_cores(cores)
    rows: Any = TrainRows(cores, table.shape)
    if orders.replaced is not None:
        rows = _WithReplacedRows(rows, *orders.replaced)
    fit = reordered_rows(rows, table.shape, orders.old, orders.new, **orders.options)
    after = table.with_shape(fit.shape)
    of_cores = {
        *table.spec.param_names,
        *(name for names in table.spec.slot_names for name in names),
    }
    kept = {name: value for name, value in state.items() if name not in of_cores}
    carry: dict[str, Carry] = dict.fromkeys(
        (*table.spec.param_names, *after.spec.param_names), restarted
    )
    return Change(
        after, kept | with_params(state, after, after.spec.named(fit.cores), carry), carry, fit
    )


class _WithReplacedRows:
    """A table some of whose rows are replaced by cached values."""

    def __init__(self, table: TrainRows, tags: np.ndarray, values: np.ndarray):
        self.shape, self.dtype = table.shape, table.dtype
        slots = np.argsort(tags)
        slots = slots[tags[slots] >= 0]
        self._table, self._rows, self._values = table, tags[slots], values[slots]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        values = self._table[rows]
        if len(self._rows):
            at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
            replaced = self._rows[at] == rows
            values[replaced] = self._values[at[replaced]]
        return values
