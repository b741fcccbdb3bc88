"""Rows of a table in blocks, from slices of one of its parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax

from jax_tt._table.table import Table


@dataclasses.dataclass(frozen=True)
class RowSlices:
    """Which rows are made of which slices of a parameter along its first axis.

    Attributes:
        name: of the parameter. Rows with consecutive ids are made of the same slice or of consecutive ones.
        rows_each: the number of rows that are made of one slice.
        rows: maps the parameters by name, that one as ``[places, slices, ...]``, to rows
            ``[places, slices * rows_each, D]``.
    """

    name: str
    rows_each: int
    rows: Callable[[Mapping[str, jax.Array]], jax.Array]


@functools.singledispatch
def row_slices(table: Table) -> RowSlices | None:
    """How blocks of rows follow from a part of a table's parameters; None if they do not. Kinds register it.

    What uses all rows in blocks, such as a softmax, then has gradients of the slices of a block, which are small, in
    place of gradients of the whole parameter.
    """
    del table
    return None
