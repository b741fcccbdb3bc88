"""The tables of a call, divided into groups that one op handles.

By default a table is on its own, and is handled by `Table.forward`, `backward` and `step`. An op for many tables is a
`Group`: `groups_of` returns it with the tables that it takes, and nothing else has to know of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch, present, spread_to_positions
from jax_tt._ids.id_space import digits_in_range
from jax_tt._ids.inputs import one_bag_per_position
from jax_tt._table.added import MissingRows
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.options import IGNORED, Lookup, NeededCotangents
from jax_tt._table.parts_of_arrays import FlatBags
from jax_tt._table.row_shard import RowShard
from jax_tt._table.state import State
from jax_tt._table.table import Table, scope_of
from jax_tt._table.wrapper import Wrapper, innermost

# The cotangents of one table: of the arrays of its state by name, and of the weights. Those of a fused table are its
# new values.
Cotangents = tuple[dict[str, Any], jax.Array | None]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BoundTable:
    """A table and how a call of it runs.

    Attributes:
        table: the table.
        lookup: its options, with the method that was chosen and the cotangents that the loss needs.
        execution: what `Table.execution` returned; None within an operation, which is not chosen again.
        shard: the rows of the table that this device has inside a ``shard_map``, if not all of them.
        has_parts: whether the call has a `Part` of an array that tables share, in its state or its batch.
        blocks: of the batch in native calls, if it is not to have as many as XLA may partition.
    """

    table: Table
    lookup: Lookup
    execution: Any = None
    shard: RowShard | None = None
    has_parts: bool = False
    blocks: int | None = None

    def wanting(self, wanted: NeededCotangents) -> BoundTable:
        """The same with the cotangents that the loss needs."""
        return dataclasses.replace(self, lookup=self.lookup.replace(wanted=wanted))


class Call(NamedTuple):
    """The lookup of a batch in one table.

    Attributes:
        use: static.
        state: the arrays that are trained or constant.
        batch: prepared.
        values: `step_values` of a fused table.
        added: another lookup, whose sums are added to those of this one, or None.
        limit: the largest absolute value of the elements of the gradient that steps take, broadcastable to the sums
            ``[S, nb, D]``; None for no limit.
        flat: the arrays of the batch by name as `FlatBags`, which native ops may take in their place; None if they are
            no parts of such arrays.
    """

    use: BoundTable
    state: State
    batch: Batch
    values: Any
    added: MissingRows | None = None
    limit: jax.Array | None = None
    flat: Mapping[str, FlatBags] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape ``[S, nb, D]`` of the sums."""
        return self.batch.num_segments, self.batch.num_bags, self.use.table.features


# The gradient of every call's sums, None for those that the loss does not use; or of one array with all of them.
Gradients = Any


class Group(Protocol):
    """An op for several tables; all sequences are in the order of ``calls``.

    Attributes:
        unwraps: whether it takes tables without their wrappers.
    """

    unwraps: ClassVar[bool]

    def forward(self, calls: Sequence[Call], wide: ConcatLayout | None) -> tuple[Any, Any]:
        """Sums ``[S, nb, D]`` in the accumulator type of every table, and the residuals of the group.

        With ``wide``, one array with the sums in their columns, which are all that it has.
        """
        ...

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Gradients, wide: ConcatLayout | None
    ) -> Sequence[Cotangents]:
        """The cotangents that are wanted; none of a table whose ``g`` is None, as the loss does not use its sums.

        With ``wide``, the gradients of all sums are in its columns of one array, whether `forward` wrote them there or
        not.
        """
        ...


class Members(NamedTuple):
    """A group and the numbers of its tables, or a table on its own.

    Attributes:
        group: None for a table on its own.
        numbers: of the tables.
        scope: their names in profiles.
        uses: the tables as the group takes them.
    """

    group: Group | None
    numbers: tuple[int, ...]
    scope: str
    uses: tuple[BoundTable, ...]


Groups = tuple[Members, ...]


@functools.lru_cache(maxsize=1024)
def groups_of(uses: tuple[BoundTable, ...]) -> Groups:
    """The groups, each with the numbers of its tables; None for a table on its own."""
    members: dict[Group | None, list[int]] = {}
    for k, use in enumerate(uses):
        members.setdefault(use.execution.group, []).append(k)
    alone = members.pop(None, [])
    groups = *((None, (k,)) for k in alone), *((group, tuple(k)) for group, k in members.items())
    found = []
    for group, numbers in groups:
        own = tuple(uses[k] for k in numbers)
        if group is not None and group.unwraps:
            own = tuple(dataclasses.replace(use, table=innermost(use.table)) for use in own)
        found.append(Members(group, numbers, scope_of(uses[k].table for k in numbers), own))
    return tuple(found)


def forward(calls: Sequence[Call], wide: ConcatLayout | None) -> tuple[Any, list[Any]]:
    """The sums of every table, or one array of them, and the residuals of every group."""
    groups = groups_of(tuple(call.use for call in calls))
    sums: dict[int, jax.Array] = {}
    saved = []
    for group, numbers, scope, uses in groups:
        given = [calls[k]._replace(use=use) for k, use in zip(numbers, uses, strict=True)]
        with jax.named_scope(scope):
            if group is None:
                use, state, batch, *_ = given[0]
                sums[numbers[0]], residuals = use.table.forward(state, batch, use.lookup)
            elif wide is not None and len(groups) == 1:
                array, residuals = group.forward(given, wide.of(numbers))
                return array, [residuals]
            else:
                found, residuals = group.forward(given, None)
                sums.update(zip(numbers, found, strict=True))
        saved.append(residuals)
    in_order = tuple(sums[k] for k in range(len(calls)))
    return (in_order if wide is None else wide.joined(in_order)), saved


def backward(
    calls: Sequence[Call], saved: Sequence[Any], gs: Gradients, wide: ConcatLayout | None
) -> list[Cotangents]:
    """The wanted cotangents of every table; none of those whose ``g`` is None."""
    cotangents: dict[int, Cotangents] = {}
    groups = groups_of(tuple(call.use for call in calls))
    for (group, numbers, scope, uses), residuals in zip(groups, saved, strict=True):
        given = [calls[k]._replace(use=use) for k, use in zip(numbers, uses, strict=True)]
        columns = None if wide is None else wide.of(numbers)
        with jax.named_scope(scope):
            if group is not None:
                own = gs if wide is not None else [gs[k] for k in numbers]
                found = group.backward(given, residuals, own, columns)
            else:
                (call,) = given
                (g,) = [gs[numbers[0]]] if columns is None else columns.separated(gs, [call.shape])
                found = [of_one_table(call, residuals, g)]
            cotangents.update(zip(numbers, found, strict=True))
    return [cotangents[k] for k in range(len(calls))]


def of_one_table(call: Call, residuals: Any, g: jax.Array | None) -> Cotangents:
    """The wanted cotangents of a table on its own."""
    use, state, batch, values, *_ = call
    table, lookup = use.table, use.lookup
    if g is None or not (lookup.wanted.names or lookup.wanted.weights):
        return {}, None
    if not lookup.wanted.names:
        return {}, weights_gradient(table, state, batch, g, lookup)
    if table.update is None:
        return table.backward(state, batch, residuals, g, lookup)
    return table.step(state, batch, residuals, g, lookup, values)


@functools.singledispatch
def weights_gradient(
    table: Table, state: State, batch: Batch, g: jax.Array, lookup: Lookup
) -> jax.Array:
    """``row(i_j) . g[b(j)]`` for every position, without computing gradients of the table."""
    lookup = lookup.replace(wanted=NeededCotangents())
    rows, _ = table.forward(state, one_bag_per_position(batch), lookup)
    rows = rows.reshape(batch.num_segments, batch.capacity, rows.shape[-1])
    of_bag = spread_to_positions(batch, g) if batch.num_bags else jnp.zeros_like(rows)
    reads = present(batch)
    if lookup.bounds in IGNORED:
        reads &= digits_in_range(table.ids, batch)[1]
    return jnp.where(reads, jnp.sum(rows * of_bag, axis=-1), 0)


@weights_gradient.register(Wrapper)
def _(wrapper: Wrapper, state: State, batch: Batch, g: jax.Array, lookup: Lookup) -> jax.Array:
    return weights_gradient(wrapper.table, state, batch, g, lookup)
