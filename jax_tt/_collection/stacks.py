"""Stacks: the tables of a collection that are alike, in one array for each of their arrays.

A program of many tables then has as many arrays as one of few. Native ops read and step every table where it is, with
its hyper-parameters, bounds and name; elsewhere its rows are cut out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_tt._base.arguments import mismatch
from jax_tt._collection.frozen import Frozen
from jax_tt._directories.hash_directory import CLOCK, SEED, TOTALS
from jax_tt._directories.initial import InitialRows
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._kinds.hashed.table import HashTable
from jax_tt._table.check import check_state
from jax_tt._table.parts_of_arrays import is_rows, neighbours_joined, taken
from jax_tt._table.table import Table
from jax_tt.optimizers import ChangesAll, ReadsScaled


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables whose rows follow each other in the same arrays.

    Attributes:
        name: its key in the state of a collection.
        tables: by name, in the order of their rows.
    """

    name: str
    tables: Mapping[str, Table]

    @functools.cached_property
    def arrays(self) -> tuple[str, ...]:
        """The names of its arrays, which its tables have as well."""
        return tuple(_row_shapes(next(iter(self.tables.values()))))

    @functools.cached_property
    def trained_names(self) -> tuple[str, ...]:
        """The arrays that a loss is differentiated with respect to."""
        first = next(iter(self.tables.values()))
        return tuple(name for name in self.arrays if name in first.spec.trained_names)

    @functools.cached_property
    def places(self) -> Mapping[str, Mapping[str, tuple[int, int | None]]]:
        """Of every array, where each table has its part along the first axis: the first entry, and how many.

        The number is None in arrays with one entry for each table, such as the clocks.
        """
        return {name: self._places(name) for name in self.arrays}

    def _places(self, name: str) -> dict[str, tuple[int, int | None]]:
        if name in _ENTRIES:
            return {table: (k, None) for k, table in enumerate(self.tables)}
        counts = [_row_shapes(table)[name][0] for table in self.tables.values()]
        firsts = itertools.accumulate([0, *counts[:-1]])
        return dict(zip(self.tables, zip(firsts, counts, strict=True), strict=True))

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its arrays."""
        one = _row_shapes(next(iter(self.tables.values())))
        return {
            name: (len(self.tables), *shape)
            if name in _ENTRIES
            else (sum(count or 0 for _, count in self.places[name].values()), *shape[1:])
            for name, shape in one.items()
        }

    @functools.cached_property
    def takes_keys(self) -> bool:
        return next(iter(self.tables.values())).ids.takes_keys

    @property
    def is_fused(self) -> bool:
        return next(iter(self.tables.values())).update is not None

    def joined(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, jax.Array]:
        """The arrays of the stack from those of all of its tables, which are not copied if they are all of its rows.

        Raises:
            TypeError, ValueError: a table lacks an array, or it does not fit the table.
        """
        axes = self._axes_of_models(states)
        for name, table in self.tables.items():
            own = (
                {k: _of_one_model(x, axes) for k, x in states[name].items()}
                if axes
                else states[name]
            )
            check_state(table, own)
        return {
            name: self._whole({table: states[table][name] for table in self.tables}, name)
            for name in self.arrays
        }

    def _axes_of_models(self, states: Mapping[str, Mapping[str, Any]]) -> int:
        """How many axes the arrays of a state of several models have in front of those of one."""
        one, first = self.arrays[0], next(iter(self.tables))
        return max(0, np.ndim(states[first].get(one, ())) - len(self.shapes[one]))

    def _whole(self, by_table: Mapping[str, Any], name: str) -> jax.Array:
        parts = list(by_table.values())
        if name in _ENTRIES:
            return jnp.stack(parts, parts[0].ndim - len(self.shapes[name]) + 1)
        axis = parts[0].ndim - len(self.shapes[name])
        firsts = [first for first, _ in self.places[name].values()]
        array: Any = next((part.array for part in parts if is_rows(part)), None)
        if array is not None and array.shape[axis] != self.shapes[name][0]:
            array = None
        moved = [
            (first, part)
            for first, part in zip(firsts, parts, strict=True)
            if not is_rows(part) or part.array is not array or part.first != first
        ]
        if not moved:
            return parts[0].array
        one, *others = self.tables
        for table in others:
            if (got := by_table[table].dtype) != (expected := by_table[one].dtype):
                fix = "The two tables share an array; stack=False gives each its own."
                expected = f"{expected.name}, as table {one!r} has"
                raise mismatch(f"{name} of table {table!r}", got.name, expected, fix)
        if isinstance(array, Tracer):
            # The rest of a donated stack stays where it is.
            for first, part in moved:
                rows: Any = taken(part)
                array = lax.dynamic_update_slice_in_dim(array, rows, first, axis)
            return array
        return jnp.concatenate(
            [jnp.asarray(part) for part in taken(neighbours_joined(parts))], axis
        )

    def check(self, argument: str, arrays: Mapping[str, Any]) -> None:
        """Raises unless arrays by name are those of the stack."""
        for name, shape in self.shapes.items():
            got = getattr(arrays.get(name), "shape", None)
            if got is None or got[-len(shape) :] != shape:
                label = f"{argument}[{self.name!r}]"
                expected = f"shape {shape}, with the rows of {', '.join(self.tables)}"
                found = f"no array {name!r}" if got is None else f"{name!r} of shape {got}"
                raise mismatch(label, found, expected)


def _of_one_model(array: Any, axes: int) -> Any:
    shape = getattr(array, "shape", ())
    return jax.ShapeDtypeStruct(shape[axes:], array.dtype) if len(shape) >= axes > 0 else array


def stacks_of(tables: Mapping[str, Table]) -> Mapping[str, Stack]:
    """The stacks of two and more tables, by name; what is stacked follows from the descriptions of the tables alone."""
    alike: dict[Hashable, list[str]] = {}
    for name, table in tables.items():
        if (form := _form(table)) is not None:
            alike.setdefault(form, []).append(name)
    stacks: dict[str, Stack] = {}
    # Of tables in another order, arrays would have the same shape and other rows in the same places.
    for names in sorted(map(sorted, alike.values())):
        if len(names) < 2:
            continue
        # Other tables whose rows are as many in all have arrays of the same shapes, so that a state of these has to
        # have another name to be refused.
        rows = repr([(name, tables[name].num_embeddings) for name in names])
        kind = "hash" if tables[names[0]].ids.takes_keys else "dense"
        name = f"{kind}_{tables[names[0]].features}_{zlib.crc32(rows.encode()):08x}"
        if name in tables:
            got = f"the name {name!r}, which the stack of {', '.join(names)} has"
            raise mismatch("tables", got, "another name, or stack=False")
        stacks[name] = Stack(name, Frozen({name: tables[name] for name in names}, "table"))
    return stacks


def _form(table: Table) -> Hashable:
    """What tables of a stack have in common; None for a table that cannot be in one."""
    rows = table.table if type(table) is HashTable else table
    if type(rows) is not DenseTable or table.ids.takes_slots:
        return None
    keys: Hashable = None
    if isinstance(table, HashTable):
        # The keys that wait are a second directory, with sets of its own.
        if table.waiting_sets:
            return None
        # They say which arrays the operations change.
        keys = table.policy, isinstance(table.initializer, InitialRows)
    optimizer = rows.update and rows.update.optimizer
    # What changes other rows than those of a batch, or is not a native op, would take the rows out of the stack.
    if isinstance(optimizer, ReadsScaled | ChangesAll) or not rows.steps_natively:
        return None
    arrays = tuple(
        (array.name, array.role, array.shape[1:], array.dtype)
        for array in table.spec.arrays
        if array.shape is not None
    )
    return arrays, jnp.dtype(rows.param_dtype), type(optimizer), keys


def _row_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    return {
        array.name: array.shape
        for array in table.spec.arrays
        if array.role != "scalar" and array.shape is not None
    }


# Arrays of a table that have no rows or sets.
_ENTRIES = (CLOCK, SEED, TOTALS)
