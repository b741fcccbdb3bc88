"""The tables of a call, divided into groups that one op handles.

By default a table is on its own, and is handled by `Table.forward`, `backward` and `step`. An op for many tables is a
`Group`: `groups_of` returns it with the tables that it takes, and nothing else has to know of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jax_tt._lookup._batch import Batch
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import State, Table

# The cotangents of one table: of the arrays of its state by name, and of the weights. Those of a fused table are its
# new values.
Cotangents = tuple[dict[str, Any], jax.Array | None]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Use:
    """A table and the resolved options of its lookup, among which are the cotangents that the loss needs."""

    table: Table
    lookup: Lookup


class Call(NamedTuple):
    """The lookup of a batch in one table.

    Attributes:
        use: static.
        state: the arrays that are trained or constant.
        batch: prepared.
        values: `Table.step_values` of a fused table.
    """

    use: Use
    state: State
    batch: Batch
    values: Any


class Group(Protocol):
    """An op for several tables; all sequences are in the order of ``calls``."""

    def forward(self, calls: Sequence[Call]) -> tuple[Sequence[jax.Array], Any]:
        """Sums ``[S, nb, D]`` in the accumulator type of every table, and the residuals of the group."""
        ...

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Sequence[jax.Array | None]
    ) -> Sequence[Cotangents]:
        """The cotangents that are wanted; none of a table whose ``g`` is None, as the loss does not use its sums."""
        ...


@functools.lru_cache(maxsize=1024)
def groups_of(uses: tuple[Use, ...]) -> tuple[tuple[Group | None, tuple[int, ...]], ...]:
    """The groups, each with the numbers of its tables; None for a table on its own."""
    members: dict[Group | None, list[int]] = {}
    for k, use in enumerate(uses):
        members.setdefault(use.table.group(use.lookup), []).append(k)
    alone = [k for group, own in members.items() if group is None or len(own) == 1 for k in own]
    several = [
        (group, tuple(own)) for group, own in members.items() if group is not None and len(own) > 1
    ]
    return *((None, (k,)) for k in sorted(alone)), *several


def forward(calls: Sequence[Call]) -> tuple[tuple[jax.Array, ...], list[Any]]:
    """The sums of every table, and the residuals of every group."""
    sums: dict[int, jax.Array] = {}
    saved = []
    for group, members in groups_of(tuple(call.use for call in calls)):
        if group is None:
            (k,) = members
            use, state, batch, _ = calls[k]
            sums[k], residuals = use.table.forward(state, batch, use.lookup)
        else:
            found, residuals = group.forward([calls[k] for k in members])
            sums.update(zip(members, found, strict=True))
        saved.append(residuals)
    return tuple(sums[k] for k in range(len(calls))), saved


def backward(
    calls: Sequence[Call], saved: Sequence[Any], gs: Sequence[jax.Array | None]
) -> list[Cotangents]:
    """The wanted cotangents of every table; none of those whose ``g`` is None."""
    found: dict[int, Cotangents] = {}
    groups = groups_of(tuple(call.use for call in calls))
    for (group, members), residuals in zip(groups, saved, strict=True):
        own, of_own = [calls[k] for k in members], [gs[k] for k in members]
        if group is None:
            cotangents = [_of_one_table(own[0], residuals, of_own[0])]
        else:
            cotangents = group.backward(own, residuals, of_own)
        found.update(zip(members, cotangents, strict=True))
    return [found[k] for k in range(len(calls))]


def _of_one_table(call: Call, residuals: Any, g: jax.Array | None) -> Cotangents:
    use, state, batch, values = call
    table, lookup = use.table, use.lookup
    if g is None or not (lookup.wanted.names or lookup.wanted.weights):
        return {}, None
    if not lookup.wanted.names:
        return {}, table.weights_gradient(state, batch, g, lookup)
    if table.update is None:
        return table.backward(state, batch, residuals, g, lookup)
    return table.step(state, batch, residuals, g, lookup, values)
