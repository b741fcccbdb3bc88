"""Copies of a table with another name or update, for serving, and without the values of initial states."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_tt._table.check import check_state
from jax_tt._table.dispatch import dispatched
from jax_tt._table.options import Update
from jax_tt._table.types import State


@dispatched
def with_name(table: Any, name: str | None) -> Any:
    """The table with another name, which error messages have.

    >>> import jax_tt
    >>> jax_tt.extension.with_name(jax_tt.tables.DenseTable(1000, 16), "items").name
    'items'
    """
    return dataclasses.replace(table, name=name)


@dispatched
def with_update(table: Any, update: Update | None) -> Any:
    """The table with another update; without one, its gradients are ordinary.

    >>> import jax_tt
    >>> update = jax_tt.Update(jax_tt.optimizers.Adagrad(0.1))
    >>> jax_tt.extension.with_update(jax_tt.tables.DenseTable(1000, 16), update).update == update
    True
    """
    return dataclasses.replace(table, update=update)


@dispatched
def without_values(table: Any) -> Any:
    """The table without arrays that only its initial states need, such as the rows that `DenseTable.of` was given."""
    return table


@dispatched
def freeze(table: Any, state: State) -> tuple[Any, dict[str, Any]]:
    """A table for serving: the table without its update, and the state without that of the optimizer.

    Raises:
        ValueError: the state is not one of this table.

    >>> import jax, jax_tt
    >>> table = jax_tt.tables.DenseTable(1000, 16, update=jax_tt.Update(jax_tt.optimizers.Adagrad(0.1)))
    >>> served, arrays = jax_tt.extension.freeze(table, table.init(jax.random.key(0)))
    >>> served.update is None, list(arrays)
    (True, ['embedding'])
    """
    check_state(table, state)
    frozen = with_update(table, None)
    return frozen, _kept(frozen, state)


def freeze_wrapper(wrapper: Any, state: State) -> tuple[Any, dict[str, Any]]:
    """`freeze` of a wrapper, for registration: around the frozen table, with the arrays that the wrapper keeps."""
    check_state(wrapper, state)
    table, arrays = freeze(wrapper.table, state)
    frozen = dataclasses.replace(wrapper, table=table)
    return frozen, _kept(frozen, {**state, **arrays})


def copy_wrapper(kind: type) -> None:
    """Registers for a kind of wrapper that a copy of it is one around the copy of its table."""
    for function in (with_name, with_update, without_values):

        def copied(wrapper: Any, *args: Any, function: Any = function) -> Any:
            return dataclasses.replace(wrapper, table=function(wrapper.table, *args))

        function.register(kind, copied)


def _kept(frozen: Any, state: State) -> dict[str, Any]:
    names = {*frozen.spec.param_names, *frozen.spec.constant_names, *frozen.spec.buffers}
    return {name: array for name, array in state.items() if name in names}
