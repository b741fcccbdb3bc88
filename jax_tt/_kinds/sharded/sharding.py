"""`Sharding`: what the program of one device needs to know of a sharded table."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_tt._ids.id_space import IdSpace
from jax_tt._ids.placement import Layout
from jax_tt._kinds.sharded.options import Exchange
from jax_tt._table.groups import Call

# The name of the page table in a state.
PAGES = "page_table"


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a table is sharded.

    Attributes:
        ids: of the whole table.
        axes: mesh axes that the rows are sharded over.
        others: the other axes of the mesh, along which devices hold the same rows.
        layout: where the pages of rows are.
        exchange: how rows and gradients travel.
        shard: the table that one device holds.
        names: the arrays of the state that are sharded; the others are replicated.
    """

    ids: IdSpace
    axes: tuple[str, ...]
    others: tuple[str, ...]
    layout: Layout
    exchange: Exchange
    shard: Any
    names: frozenset[str]

    @property
    def everywhere(self) -> tuple[str, ...]:
        """All axes of the mesh."""
        return (*self.others, *self.axes)

    @property
    def rows(self) -> Any:
        """The table of the rows that one device holds."""
        return self.shard.table if self.ids.takes_keys else self.shard


def sharding_of(call: Call) -> Sharding:
    """The sharding of the table of a call of a `ShardedGroup`."""
    table: Any = call.use.table
    return table.sharding
