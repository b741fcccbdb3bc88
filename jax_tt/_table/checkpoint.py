"""How the state of a table is saved: for one device, by the rows of a table of one device, or in pieces, by many.

A kind whose arrays are not saved as they are registers these functions.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_tt._table.state import State
from jax_tt._table.wrapper import dispatched


@dispatched
def unsharded(table: Any) -> Any:
    """The table as one device would hold it, whose states `by_row` returns and `of_rows` takes."""
    return table


@dispatched
def by_row(table: Any, state: State) -> dict[str, Any]:
    """The state of `unsharded`."""
    del table
    return dict(state)


@dispatched
def of_rows(table: Any, state: State) -> dict[str, Any]:
    """The inverse of `by_row`, also of that of other devices."""
    del table
    return dict(state)


@dispatched
def pieces(table: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and shardings of the arrays of `in_pieces`."""
    return jax.eval_shape(table.init, jax.random.key(0))


@dispatched
def in_pieces(table: Any, state: State) -> dict[str, Any]:
    """`by_row` without a device or process that has all rows: sharded, with zeros after the rows.

    It and `of_pieces` also take some of the arrays of a state, or others that are laid out like them, such as moments.
    Keys of hash tables stay in their slots.
    """
    del table
    return dict(state)


@dispatched
def of_pieces(table: Any, state: State) -> dict[str, Any]:
    """The inverse of `in_pieces`, also of those of other devices, unless these are of a hash table."""
    del table
    return dict(state)


VIEWS = (unsharded, by_row, of_rows, pieces, in_pieces, of_pieces)
