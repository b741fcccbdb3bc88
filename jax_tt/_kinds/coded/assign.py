"""The codes of given rows in given codebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.sample import finite
from jax_tt._kinds.coded import codec, product

if TYPE_CHECKING:
    from jax_tt._kinds.coded.table import CodedTable
    from jax_tt._table.types import State

# Rows that are encoded at a time.
BLOCK = 2**14

_packed = jax.jit(codec.packed, static_argnums=1)


def encoded_rows(
    table: CodedTable,
    state: State,
    rows: Any,
    hot: np.ndarray | None,
    step: Callable[[], object] = lambda: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes uint8 ``[n, W]`` of rows ``[n, D]``, and those that only hot rows have, ``[h, V]``.

    Rows are read in blocks, after each of which ``step`` is called. ``hot`` tells which rows are hot; None for no row.
    """
    shape = table.column_parts, -1, 1 << table.bits, table.width
    codebooks = np.asarray(table.codebook_rows(state), np.float32).reshape(shape)
    terms = table.part_terms - table.hot_terms
    hot = np.zeros(rows.shape[0], bool) if hot is None else hot
    found = np.empty((rows.shape[0], table.row_bytes), np.uint8)
    of_hot = np.empty((int(hot.sum()), table.hot_bytes), np.uint8)
    before = 0
    for start in range(0, len(found), BLOCK):
        own = range(start, min(start + BLOCK, len(found)))
        block, here = (
            finite(f"{table.ids.label}rows", rows[start : own.stop], own),
            hot[start : own.stop],
        )
        if table.rotated:
            block = block @ np.asarray(state["rotation"]).T
        codes = np.empty((len(block), table.num_codes), np.int32)
        codes[~here] = product.nearest_codes(block[~here], codebooks[:, :terms])
        if here.any():
            both = product.nearest_codes(block[here], codebooks).reshape(-1, *codebooks.shape[:2])
            codes[here] = both[:, :, :terms].reshape(len(both), -1)
            more = _in_blocks(both[:, :, terms:].reshape(len(both), -1), table.bits, len(found))
            of_hot[before : before + len(both)] = more
            before += len(both)
        found[start : own.stop] = _in_blocks(codes, table.bits, len(found))
        step()
    return found, of_hot


def _in_blocks(codes: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Packed codes of at most a block of n rows; blocks of one shape are packed by one program."""
    padded = np.pad(codes, [(0, min(BLOCK, n) - len(codes)), (0, 0)])
    return np.asarray(_packed(jnp.asarray(padded), bits))[: len(codes)]
