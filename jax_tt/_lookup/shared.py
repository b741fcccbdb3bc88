"""`Shared`: the scalars of fused tables, held once for all tables of a collection.

Programs of many tables have fewer arrays and operations for it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._table.state import kept_sentinel
from jax_tt._table.table import Table

# Scalars that one reduction adds: the parameters of a kernel are limited.
_AT_ONCE = 32
# The scalars that a collection has once, whatever its tables are.
FLAGS = ("sentinel", "used")


class Shared(NamedTuple):
    """Scalars of the tables whose `Update` is shared.

    Attributes:
        steps: the number of updates of every table, in their order; a sequence of scalars, or one array of them.
        sentinel, used: as those of a single table.
    """

    steps: Any
    sentinel: Any
    used: Any

    def states(self, tables: Sequence[Table], **more: Any) -> list[dict[str, Any]]:
        """What every table reads of them, with ``more``, by name; nothing for a table with scalars of its own."""
        places = shared_places(tuple(tables))
        return [
            {"step": self._step(places[k]), "sentinel": self.sentinel, **more}
            if k in places
            else {}
            for k in range(len(tables))
        ]

    def _step(self, place: int) -> Any:
        # In place of an array, `custom_vjp` gives one mark for all of its entries.
        return self.steps[place] if isinstance(self.steps, Sequence | jax.Array) else self.steps

    def after(self, applied: Mapping[int, Any]) -> Shared:
        """Those after steps of the tables at these places, each 1 if it was applied, else 0."""
        if isinstance(self.steps, Sequence):
            stepped = _added([self.steps[k] for k in applied], list(applied.values()))
            after = dict(zip(applied, stepped, strict=True))
            steps: Any = [after.get(k, step) for k, step in enumerate(self.steps)]
        else:
            zero = jnp.zeros((), self.steps.dtype)
            steps = self.steps + jnp.stack(
                [applied.get(k, zero) for k in range(self.steps.shape[0])]
            )
        return Shared(
            steps,
            kept_sentinel(self.sentinel),
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


@functools.lru_cache(maxsize=256)
def shared_places(tables: tuple[Table, ...]) -> Mapping[int, int]:
    """The places in a `Shared` of the tables that have one, by their numbers."""
    numbers = [k for k, table in enumerate(tables) if is_shared(table)]
    return {k: place for place, k in enumerate(numbers)}


def _added(steps: Sequence[Any], applied: Sequence[Any]) -> list[Any]:
    if varying_axes(steps, applied):
        return _added_one_by_one(steps, applied)
    return lax.platform_dependent(steps, applied, cuda=_added_one_by_one, default=_added_in_parts)


def _added_one_by_one(steps: Sequence[Any], applied: Sequence[Any]) -> list[Any]:
    """XLA makes one kernel of them for a GPU, which overwrites the steps. A reduction there copies each of them."""
    return [step + more for step, more in zip(steps, applied, strict=True)]


def _added_in_parts(steps: Sequence[Any], applied: Sequence[Any]) -> list[Any]:
    """XLA compiles a kernel for every result of separate additions for a CPU; this is fewer."""
    parts = [slice(k, k + _AT_ONCE) for k in range(0, len(steps), _AT_ONCE)]
    return [x for part in parts for x in _added_at_once(steps[part], applied[part])]


@jax.custom_batching.custom_vmap
def _added_at_once(steps: Sequence[Any], applied: Sequence[Any]) -> list[Any]:
    zeros = [jnp.zeros((), jnp.float32)] * len(steps)
    pairs = [jnp.stack(pair) for pair in zip(steps, applied, strict=True)]
    return lax.reduce(pairs, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (0,))


@_added_at_once.def_vmap
def _(axis_size: int, batched: Any, steps: Sequence[Any], applied: Sequence[Any]) -> Any:
    del axis_size
    return _added_one_by_one(steps, applied), [any(pair) for pair in zip(*batched, strict=True)]
