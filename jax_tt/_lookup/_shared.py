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


class Shared(NamedTuple):
    """Scalars of the tables whose `Update` is shared, in their order.

    Attributes:
        step: the number of updates of every table, ``[tables]``.
        sentinel, used: as those of a single table.
    """

    step: Any
    sentinel: Any
    used: Any

    @classmethod
    def init(cls, tables: int) -> Shared:
        """Those of tables at step 0."""
        # Two arrays, since one cannot be donated twice.
        ones = (jnp.ones((), jnp.float32) for _ in range(2))
        return cls(jnp.zeros(tables, jnp.float32), *ones)

    def states(self, tables: Sequence[Table]) -> list[dict[str, Any]]:
        """What every table reads of them; nothing for a table with scalars of its own."""
        places = shared_places(tables)
        return [
            {"step": self.step[places[k]], "sentinel": self.sentinel} if k in places else {}
            for k in range(len(tables))
        ]

    def after(self, applied: Mapping[int, Any]) -> Shared:
        """Those after steps of the tables at these places, each 1 if it was applied, else 0."""
        counts = [applied.get(k, jnp.zeros((), jnp.float32)) for k in range(self.step.shape[0])]
        return Shared(
            self.step + jnp.stack(counts),
            _sentinel.kept(self.sentinel),
            # A compile-time constant, so that the compiler knows that the old tables are not needed.
            vary_over(jnp.ones((), jnp.float32), varying_axes(self.used)),
        )


def is_shared(table: Table) -> bool:
    """Whether the scalars of a fused table are in a `Shared`."""
    return table.update is not None and table.update.shared


def shared_places(tables: Sequence[Table]) -> dict[int, int]:
    """The places in a `Shared` of the tables that have one, by their numbers."""
    numbers = [k for k, table in enumerate(tables) if is_shared(table)]
    return {k: place for place, k in enumerate(numbers)}
