"""`Shared`: the scalars of the fused tables of a collection.

Programs of many tables have fewer arrays and operations for it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._table.state import kept_sentinel
from jax_tt._table.table import Table

# The names of these arrays.
SHARED = ("step", "sentinel", "used")


class Shared(NamedTuple):
    """Scalars of the tables whose `Update` is shared.

    Attributes:
        steps: the number of updates of every table, in their order.
        sentinel, used: as those of a single table.
    """

    steps: Any
    sentinel: Any
    used: Any

    def states(self, tables: Sequence[Table], **more: Any) -> list[dict[str, Any]]:
        """What every table reads of them, with ``more``, by name; nothing for a table with scalars of its own."""
        places = shared_places(tuple(tables))
        steps = self._by_table(len(places))
        return [
            {"step": steps[places[k]], "sentinel": self.sentinel, **more} if k in places else {}
            for k in range(len(tables))
        ]

    def _by_table(self, tables: int) -> list[Any]:
        # In place of an array, `custom_vjp` gives one mark for all of its entries.
        if not isinstance(self.steps, jax.Array):
            return [self.steps] * tables
        # A sharded table leaves them on its mesh, which need not be the mesh around a call.
        with jax.sharding.use_abstract_mesh(jax.typeof(self.steps).sharding.mesh):
            if not isinstance(self.steps, Tracer):
                return list(jnp.unstack(self.steps))  # in one program for all of them
            return [lax.index_in_dim(self.steps, k, keepdims=False) for k in range(tables)]

    def after(self, applied: Mapping[int, Any]) -> Shared:
        """Those after steps of the tables at these places, each 1 if it was applied, else 0."""
        zero = jnp.zeros((), self.steps.dtype)
        of_tables = [applied.get(k, zero) for k in range(self.steps.shape[0])]
        return Shared(
            self.steps + jnp.stack(of_tables),
            kept_sentinel(self.sentinel),
            # A compile-time constant, so that the compiler knows that the old tables are not needed.
            vary_over(jnp.ones((), jnp.float32), varying_axes(self.used)),
        )


def init_shared(tables: int) -> dict[str, Any]:
    """`SHARED` of so many tables at step 0, by name."""
    # Two arrays for the flags, since one cannot be donated twice.
    shapes = dict.fromkeys(SHARED, ()) | {"step": (tables,)}
    return {name: jnp.full(shape, name != "step", jnp.float32) for name, shape in shapes.items()}


def is_shared(table: Table) -> bool:
    """Whether the scalars of a fused table are in a `Shared`."""
    return table.update is not None and table.update.shared


@functools.lru_cache(maxsize=256)
def shared_places(tables: tuple[Table, ...]) -> Mapping[int, int]:
    """The places in a `Shared` of the tables that have one, by their numbers."""
    numbers = [k for k, table in enumerate(tables) if is_shared(table)]
    return {k: place for place, k in enumerate(numbers)}
