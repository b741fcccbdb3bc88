"""Names of a table's variables, and the way between them and what the ops take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_tt._ops._table import SCALARS, FusedTable, init_fused_table
from jax_tt.optimizers import Optimizer


def core_names(d: int) -> tuple[str, ...]:
    """``core_0 ... core_{d-1}``."""
    return tuple(f"core_{k}" for k in range(d))


def slot_name(slot: str, k: int) -> str:
    """Variable of slot ``slot`` of the ``k``-th core; a dense table counts as core 0."""
    return f"slot_{slot}_{k}"


def fresh_state(optimizer: Optimizer, params: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Everything a fused table holds beside its parameters, by variable name."""
    table = init_fused_table(tuple(params), optimizer)
    state = {
        slot_name(slot.name, k): value
        for k, slots in enumerate(table.slots)
        for slot, value in zip(optimizer.slots, slots, strict=True)
    }
    return state | {part: getattr(table, part) for part in SCALARS}


def fused_table(
    optimizer: Optimizer, params: Sequence[jax.Array], read: Callable[[str], Any]
) -> FusedTable:
    """The table made of ``params`` and the variables that ``read`` returns by name."""
    slots = tuple(
        tuple(read(slot_name(slot.name, k)) for slot in optimizer.slots) for k in range(len(params))
    )
    return FusedTable(tuple(params), slots, *map(read, SCALARS))
