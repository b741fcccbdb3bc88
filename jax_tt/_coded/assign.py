"""The codes of given rows in given codebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._coded import codec, product

if TYPE_CHECKING:
    from jax_tt._coded.table import CodedTable
    from jax_tt._tables.table import State

# Rows that are encoded at a time.
BLOCK = 2**14

_packed = jax.jit(codec.packed, static_argnums=1)


def encoded_rows(
    table: CodedTable, state: State, rows: Any, step: Callable[[], object] = lambda: None
) -> np.ndarray:
    """Packed codes uint8 ``[n, W]`` of rows ``[n, D]``, read in blocks, after each of which ``step`` is called."""
    shape = table.column_parts, -1, 1 << table.bits, table.width
    codebooks = np.asarray(state["codebooks"].astype(jnp.float32)).reshape(shape)
    found = np.empty((rows.shape[0], table.row_bytes), np.uint8)
    for start in range(0, len(found), BLOCK):
        own = range(start, min(start + BLOCK, len(found)))
        block = finite("rows", rows[start : own.stop], own)
        if table.rotated:
            block = block @ np.asarray(state["rotation"]).T
        codes = product.nearest_codes(block, codebooks)
        # Blocks of one shape are packed by one program.
        size = min(BLOCK, len(found))
        codes = np.pad(codes, [(0, size - len(codes)), (0, 0)])
        found[start : own.stop] = _packed(jnp.asarray(codes), table.bits)[: len(block)]
        step()
    return found


def finite(argument: str, block: Any, numbers: Any) -> np.ndarray:
    """Rows in float32; raises for one that is not finite, with its number."""
    block = np.asarray(block).astype(np.float32)
    good = np.isfinite(block).all(axis=1)
    if not good.all():
        bad = numbers[int(np.argmin(good))]
        raise ValueError(f"{argument}: row {bad} holds NaN or infinity; expected finite numbers.")
    return block
