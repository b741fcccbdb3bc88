"""Copies of a table with another name or update, for serving, and without the values of initial states."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_tt._table.change import has_cache, maintain
from jax_tt._table.check import check_state, check_wrapper
from jax_tt._table.checkpoint import VIEWS
from jax_tt._table.options import Update
from jax_tt._table.state import State
from jax_tt._table.wrapper import default, delegate, dispatched


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
def with_default_stddev(table: Any, stddev: float) -> Any:
    """The table whose initial rows have entries of this standard deviation if nothing else has been chosen.

    Kinds register it whose default is another one than that of ``nnx.Embed``, rows of about unit length.

    >>> import jax, jax_tt
    >>> table = jax_tt.extension.with_default_stddev(jax_tt.tt_table(1000, 16, tt_ranks=4), 0.25)
    >>> rows = jax_tt.tables.to_dense(table, table.init(jax.random.key(0)))
    >>> round(float(rows.std()), 3)
    0.25
    """
    del stddev
    return table


@dispatched
def without_values(table: Any) -> Any:
    """The table without arrays that only its initial states need, such as the rows that `DenseTable.of` was given."""
    return table


@dispatched
def freeze(table: Any, state: State) -> tuple[Any, dict[str, Any]]:
    """A table for serving: the table without its update, and the state without optimizer state.

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


_COPIES = with_name, with_update, with_default_stddev, without_values


def register_wrapper(kind: type) -> None:
    """Registers what most wrappers do where a kind of wrapper has registered nothing.

    A copy of the wrapper is one around the copy of its table, and the arrays that it adds are saved as they are, kept
    when it is frozen, and need no maintenance. A kind registers itself how it grows, and what it does to rows, before
    it calls this.

    >>> import jax_tt
    >>> class Logged(jax_tt.extension.Wrapper):
    ...     pass
    >>> jax_tt.extension.register_wrapper(Logged)
    >>> jax_tt.extension.with_name(Logged(jax_tt.dense_table(10, 4)), "users").name
    'users'
    """
    plain = {view: default(view) for view in VIEWS}
    plain |= {copy: _copy_of(copy) for copy in _COPIES}
    plain |= {check_state: check_wrapper, freeze: freeze_wrapper, maintain: _maintain_inner}
    for function, registered in plain.items():
        if kind not in function.registry:
            function.register(kind, registered)
    if kind not in has_cache.registry:
        delegate(kind, has_cache)


def freeze_wrapper(wrapper: Any, state: State) -> tuple[Any, dict[str, Any]]:
    """`freeze` of a wrapper: around the frozen table, with the arrays that the wrapper keeps."""
    check_state(wrapper, state)
    table, arrays = freeze(wrapper.table, state)
    frozen = dataclasses.replace(wrapper, table=table)
    return frozen, _kept(frozen, {**state, **arrays})


def _copy_of(function: Any) -> Any:
    def copied(wrapper: Any, *args: Any) -> Any:
        return dataclasses.replace(wrapper, table=function(wrapper.table, *args))

    return copied


def _maintain_inner(wrapper: Any, state: State, method: str = "auto") -> dict[str, Any]:
    return {**state, **maintain(wrapper.table, state, method)}


def _kept(frozen: Any, state: State) -> dict[str, Any]:
    names = {*frozen.spec.param_names, *frozen.spec.constant_names, *frozen.spec.buffers}
    return {name: array for name, array in state.items() if name in names}
