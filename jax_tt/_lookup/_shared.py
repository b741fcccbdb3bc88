"""`Shared`: the scalars of fused tables, held once for all tables of a collection.

Programs of many tables have fewer arrays and operations for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_tt import _sentinel
from jax_tt._lookup._vma import vary_over, varying_axes
from jax_tt._tables.table import Table

# The scalars that a collection has once, whatever its tables are.
FLAGS = ("sentinel", "used")


class Shared(NamedTuple):
    """Scalars of the tables whose `Update` is shared.

    Attributes:
        steps: the number of updates of every table, in their order.
        sentinel, used: as those of a single table.
    """

    steps: Sequence[Any]
    sentinel: Any
    used: Any

    def all_of(self, tables: Sequence[Table]) -> list[dict[str, Any]]:
        """The scalars of every table by name; nothing for a table with scalars of its own."""
        places = shared_places(tables)
        flags = {"sentinel": self.sentinel, "used": self.used}
        return [
            {"step": self.steps[places[k]], **flags} if k in places else {}
            for k in range(len(tables))
        ]

    def states(self, tables: Sequence[Table]) -> list[dict[str, Any]]:
        """What every table reads of them."""
        return [
            {name: value for name, value in own.items() if name != "used"}
            for own in self.all_of(tables)
        ]

    def after(self, applied: Mapping[int, Any]) -> Shared:
        """Those after steps of the tables at these places, each 1 if it was applied, else 0."""
        return Shared(
            [step + applied[k] if k in applied else step for k, step in enumerate(self.steps)],
            _sentinel.kept(self.sentinel),
            # A compile-time constant, so that the compiler knows that the old tables are not needed.
            vary_over(jnp.ones((), jnp.float32), varying_axes(self.used)),
        )


def init_flags() -> dict[str, Any]:
    """`FLAGS` of tables at step 0, by name."""
    # Two arrays, since one cannot be donated twice.
    return {name: jnp.ones((), jnp.float32) for name in FLAGS}


def is_shared(table: Table) -> bool:
    """Whether the scalars of a fused table are in a `Shared`."""
    return table.update is not None and table.update.shared


def shared_places(tables: Sequence[Table]) -> dict[int, int]:
    """The places in a `Shared` of the tables that have one, by their numbers."""
    numbers = [k for k, table in enumerate(tables) if is_shared(table)]
    return {k: place for place, k in enumerate(numbers)}
