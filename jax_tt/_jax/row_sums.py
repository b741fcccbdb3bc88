"""Sums of rows whose error does not grow with the number of terms.

The first terms of a sum are added one after the other. Those after them are summed in blocks, in pairs, and the sums of
the blocks are added in the same way. Exported programs with a symbolic number of values have a fixed number of levels
of blocks; those that a call does not need add nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Terms that are added one after the other, and terms of a block.
_FIRST, _BLOCK = 256, 32
# Levels of blocks for a symbolic size: enough for 2^23 terms of a row. Each makes programs longer to compile.
_MOST_LEVELS = 3


def sums_by_row(
    count: int, rows: jax.Array, values: jax.Array, *, adjacent: bool = False
) -> jax.Array:
    """Sums of ``values[n, ...]`` with the same row, ``[count, ...]``.

    Args:
        count: the number of rows.
        rows: the row of every value ``[n]``, not negative. Values beyond the last row are ignored.
        values: what is summed.
        adjacent: whether values with the same row follow each other.
    """
    zeros = jnp.zeros((count, *values.shape[1:]), values.dtype)
    if rows.dtype.itemsize < 4:  # The mark for no row must fit the type.
        rows = rows.astype(jnp.int32)
    levels = _levels(rows.shape[0])
    if not levels or count == 0:
        return _scattered(zeros, rows, values)

    def in_blocks() -> jax.Array:
        if adjacent:
            return _added(zeros, rows, values, _FIRST, levels)
        order = jnp.argsort(rows, stable=True)
        return _added(zeros, rows[order], values[order], _FIRST, levels)

    terms = _scattered(jnp.zeros(count, jnp.int32), rows, jnp.ones_like(rows, jnp.int32))
    return lax.cond(jnp.max(terms) > _FIRST, in_blocks, lambda: _scattered(zeros, rows, values))


def sum_over_positions(values: jax.Array) -> jax.Array:
    """Sums of ``values[S, n, ...]`` over the second axis, ``[S, 1, ...]``; in order where n is symbolic."""
    while isinstance(values.shape[1], int) and values.shape[1] > _FIRST:
        values = _block_sums(values, 1)
    return jnp.sum(values, axis=1, keepdims=True)


def _levels(size: Any) -> int:
    """How often so many terms are summed in blocks at most."""
    if not isinstance(size, int):
        return _MOST_LEVELS
    levels, limit = 0, _FIRST
    while size > limit:
        size, limit, levels = -(-size // _BLOCK), _BLOCK, levels + 1
    return levels


def _added(
    into: jax.Array, rows: jax.Array, values: jax.Array, first: int, levels: int
) -> jax.Array:
    """Adds values to the rows of ``into``; values with the same row follow each other."""
    if not levels:
        return _scattered(into, rows, values)
    nowhere = into.shape[0]
    # A row has at least `first` terms before its late ones, so that no block has late terms of two rows.
    before = jnp.concatenate([jnp.full(first, nowhere, rows.dtype), rows])[: rows.shape[0]]
    late = (rows == before) & (rows < nowhere)
    into = _scattered(into, jnp.where(late, nowhere, rows), values)
    wide = late.reshape(-1, *(1,) * (values.ndim - 1))
    sums = _block_sums(jnp.where(wide, values, 0), 0)
    of_blocks = _in_blocks(jnp.where(late, rows, nowhere), 0, nowhere)
    return _added(into, jnp.min(of_blocks, axis=1), sums, _BLOCK, levels - 1)


def _block_sums(values: jax.Array, axis: int) -> jax.Array:
    """Sums of blocks along an axis, in pairs; the last block may be shorter."""
    halves = _in_blocks(values, axis, 0)
    while halves.shape[axis + 1] > 1:
        left, right = jnp.split(halves, 2, axis=axis + 1)
        halves = left + right
    return jnp.squeeze(halves, axis + 1)


def _in_blocks(values: jax.Array, axis: int, filling: int) -> jax.Array:
    """An axis of size n as ``[blocks, _BLOCK]``, the last block filled."""
    before, (size, *after) = values.shape[:axis], values.shape[axis:]
    blocks = (size + _BLOCK - 1) // _BLOCK
    missing = jnp.full((*before, blocks * _BLOCK - size, *after), filling, values.dtype)
    whole = jnp.concatenate([values, missing], axis)
    return whole.reshape(*before, blocks, _BLOCK, *after)


def _scattered(into: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return into.at[rows].add(values, mode="drop", wrap_negative_indices=False)
