"""`MixedTable`: a table whose rows are in several tables, such as rows of different precision."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import as_array, concrete, mismatch
from jax_tt._ids import places
from jax_tt._ids.batch import Batch, is_padding, padding_mark, with_marks
from jax_tt._ids.id_space import digits_in_range
from jax_tt._kinds.composite.composite import Composite, check_each
from jax_tt._table.check import check_arrays, check_state
from jax_tt._table.options import Lookup
from jax_tt._table.state import Array, State, StateSpec
from jax_tt._table.table import Table
from jax_tt._table.whole import attend, to_dense

# The linen collection of the arrays that tell which table has the row of an id.
COLLECTION = "mixed"
_MADE_BY = "MixedTable.with_parts makes it of the number of the table of every id."
_MOST_ROWS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class MixedTable(Composite):
    """A table in which every id has its row in one of several tables, e.g. frequent ids in one with more bits.

    The rows of each table belong to ids in increasing order. The arrays ``places_k``, uint32, of all tables but the
    last tell which ids have their rows in table k, among those that have none in an earlier one; they take 1.06 bits
    for each of these ids. In a fresh state, the first ids have their rows in the first table, and so on; `with_parts`
    sets which. `quantize_mixed` makes a table of rows with different numbers of bits.

    A lookup is one in every table, in which the other ids are padding. Tables are updated as in a `SumTable`.

    Attributes:
        tables: at least one, with the same number of columns and the same update. They have no row caches, and are not
            hash tables.
        name: for error messages.

    Raises:
        ValueError, TypeError: the tables do not fit together; the message names the first that does not.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> parts = jax_tt.tables.QuantizedTable(100, 16, 8), jax_tt.tables.QuantizedTable(900, 16, 2)
    >>> table = jax_tt.tables.MixedTable(parts)
    >>> state = table.with_parts(table.init(jax.random.key(0)), jnp.arange(1000) % 10 != 3)
    >>> table.num_embeddings, table.parts_of(state)[:5].tolist()
    (1000, [1, 1, 1, 0, 1])
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_embeddings > _MOST_ROWS:
            got = f"{self.num_embeddings} rows in all"
            raise mismatch(f"{self.ids.label}tables", got, f"at most {_MOST_ROWS}")

    def common(self, table: Table) -> str:
        return f"{table.features} columns"

    @functools.cached_property
    def num_embeddings(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sum(table.num_embeddings for table in self.tables)

    @property
    def title(self) -> str:
        # Messages tell the rows of a part.
        return f"{super().title} of {self.num_embeddings} rows"

    @functools.cached_property
    def _places_shapes(self) -> dict[str, tuple[int, int]]:
        shapes, left = {}, self.num_embeddings
        for k, table in enumerate(self.tables[:-1]):
            shapes[f"places_{k}"] = places.shape_of(left)
            left -= table.num_embeddings
        return shapes

    @functools.cached_property
    def spec(self) -> StateSpec:
        facts: dict[str, Any] = {"collection": COLLECTION, "hint": _MADE_BY}
        arrays = (
            Array(name, "constant", shape, jnp.dtype(jnp.uint32), **facts)
            for name, shape in self._places_shapes.items()
        )
        return super().spec.extended(*arrays)

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(dict(params)))
        xp: Any = jnp if traced else np
        first, left = {}, self.num_embeddings
        for name, table in zip(self._places_shapes, self.tables, strict=False):
            members = xp.arange(left) < table.num_embeddings
            first[name] = jax.device_put(places.mark_members(members))
            left -= table.num_embeddings
        return super().init_rest(params) | first

    def own_arrays(self, state: State) -> dict[str, Any]:
        return {name: state[name] for name in self._places_shapes}

    # Which table has the row of an id

    def with_parts(self, state: State, parts: Any) -> dict[str, Any]:
        """The state in which the row of every id is in the table with the given number, integers or bool ``[N]``.

        The rows stay where they are: the rows of table k belong to the ids of part k in increasing order.

        Raises:
            ValueError: they have another shape or type, or their counts are not the numbers of rows of the tables.
            TypeError: they are traced.
        """
        given = as_array(f"{self.ids.label}parts", parts)
        label = f"{self.ids.label}parts"
        concrete(label, given, "Call with_parts outside of jit, where counts can be checked.")
        if given.shape != (self.num_embeddings,) or given.dtype.kind not in "iub":
            raise mismatch(label, given, f"integers of shape [{self.num_embeddings}]")
        sizes = [table.num_embeddings for table in self.tables]
        numbers = np.asarray(given).astype(np.int64)
        counts = [int((numbers == k).sum()) for k in range(len(sizes))]
        if counts != sizes:
            got = f"{counts} ids with the numbers 0 to {len(sizes) - 1}"
            raise mismatch(f"{self.ids.label}parts", got, f"{sizes}, the rows of the tables")
        return {**state, **self._places(numbers)}

    def _places(self, parts: np.ndarray) -> dict[str, jax.Array]:
        arrays, left = {}, parts
        for k, name in enumerate(self._places_shapes):
            arrays[name] = jax.device_put(places.mark_members(left == k))
            left = left[left != k]
        return arrays

    def parts_of(self, state: State, ids: Any = None) -> jax.Array:
        """The number of the table with the row of each id ``[...]``, which must be in range, or of all; int32."""
        return self._rows_of(state, ids)[0]

    def _rows_of(self, state: State, ids: Any) -> tuple[jax.Array, jax.Array]:
        """Table and row of ids, which must be in range, or of all."""
        left = jnp.asarray(jnp.arange(self.num_embeddings) if ids is None else ids).astype(
            jnp.int32
        )
        part = jnp.full(left.shape, len(self.tables) - 1, jnp.int32)
        row = left
        for k, name in enumerate(self._places_shapes):
            waiting = part == len(self.tables) - 1
            # Ids whose table is known may be beyond those that are left.
            asked = jnp.where(waiting, left, 0)
            member, before = places.find_members(state[name], asked)
            member &= waiting
            part, row = jnp.where(member, k, part), jnp.where(member, before, row)
            left = jnp.where(waiting & ~member, left - before, left)
        return part, jnp.where(part == len(self.tables) - 1, left, row)

    # Lookups

    def batches(self, state: State, batch: Batch, lookup: Lookup) -> list[Batch]:
        batch = batch if batch.padded else with_marks(batch)
        (ids,), ok = digits_in_range(self.ids, batch)
        if lookup.bounds == "clip":
            ok = ~is_padding(batch)
        part, row = self._rows_of(state, ids)
        mark = padding_mark(batch.ids.dtype)
        batches = []
        for k in range(len(self.tables)):
            here = jnp.where(part == k, row.astype(batch.ids.dtype), mark)
            # An id out of range is out of range of all tables; the first one reports it.
            beyond = batch.ids if k == 0 else mark
            batches.append(dataclasses.replace(batch, ids=jnp.where(ok, here, beyond)))
        return batches

    # The whole table

    def _by_id(self, state: State, arrays: list[jax.Array], axis: int) -> jax.Array:
        """Arrays along the rows of every table as one along all ids."""
        part, row = self._rows_of(state, None)
        before = np.cumsum([0, *(table.num_embeddings for table in self.tables[:-1])])
        place = jnp.asarray(before.astype(np.int32))[part] + row
        return jnp.take(jnp.concatenate(arrays, axis=axis), place, axis=axis)


@to_dense.register(MixedTable)
def dense_mixed(table: MixedTable, state: State) -> jax.Array:
    return table._by_id(state, table.of_members(state, to_dense), 0)


@attend.register(MixedTable)
def attend_mixed(table: MixedTable, state: State, query: jax.Array, precision: Any) -> jax.Array:
    return table._by_id(state, table.of_members(state, attend, query, precision), 1)


@check_state.register(MixedTable)
def check_places(table: MixedTable, state: State) -> None:
    check_each(table, state)
    added = [array for array in table.spec.arrays if array.name in table._places_shapes]
    check_arrays(table, state, added)
