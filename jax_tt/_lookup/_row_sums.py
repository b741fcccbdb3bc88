"""Sums of rows whose error does not grow with the number of terms.

The first terms of a sum are added one after the other. Those after them are summed in blocks, in pairs, and the sums of
the blocks are added in the same way. In exported programs with symbolic sizes all terms are added one after the other:
the number of levels is not known there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Terms that are added one after the other, and terms of a block.
_FIRST, _BLOCK = 256, 32


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
    if not _more_than_first(rows.shape[0]) or count == 0:
        return _scattered(zeros, rows, values)

    def in_blocks() -> jax.Array:
        if adjacent:
            return _added(zeros, rows, values, _FIRST)
        order = jnp.argsort(rows, stable=True)
        return _added(zeros, rows[order], values[order], _FIRST)

    terms = _scattered(jnp.zeros(count, jnp.int32), rows, jnp.ones_like(rows, jnp.int32))
    return lax.cond(jnp.max(terms) > _FIRST, in_blocks, lambda: _scattered(zeros, rows, values))


def sum_over_positions(values: jax.Array) -> jax.Array:
    """Sums of ``values[S, n, ...]`` over the second axis, ``[S, 1, ...]``."""
    while _more_than_first(values.shape[1]):
        values = _block_sums(values, 1)
    return jnp.sum(values, axis=1, keepdims=True)


def _more_than_first(size: Any) -> bool:
    return isinstance(size, int) and size > _FIRST


def _added(into: jax.Array, rows: jax.Array, values: jax.Array, first: int) -> jax.Array:
    """``into`` with these values added, of which those with the same row follow each other."""
    if rows.size <= first:
        return _scattered(into, rows, values)
    nowhere = into.shape[0]
    # A row has at least `first` terms before its late ones, so that no block has late terms of two rows.
    late = jnp.concatenate([jnp.zeros(first, bool), rows[first:] == rows[:-first]])
    late &= rows < nowhere
    into = _scattered(into, jnp.where(late, nowhere, rows), values)
    wide = late.reshape(-1, *(1,) * (values.ndim - 1))
    sums = _block_sums(jnp.where(wide, values, 0), 0)
    of_blocks = jnp.where(late, rows, nowhere)
    padded = jnp.pad(of_blocks, (0, -rows.size % _BLOCK), constant_values=nowhere)
    return _added(into, jnp.min(padded.reshape(-1, _BLOCK), axis=1), sums, _BLOCK)


def _block_sums(values: jax.Array, axis: int) -> jax.Array:
    """Sums of blocks along an axis, in pairs; the last block may be shorter."""
    before, (size, *after) = values.shape[:axis], values.shape[axis:]
    missing = [(0, 0)] * axis + [(0, -size % _BLOCK)] + [(0, 0)] * len(after)
    halves = jnp.pad(values, missing).reshape(*before, -1, _BLOCK, *after)
    while halves.shape[axis + 1] > 1:
        left, right = jnp.split(halves, 2, axis=axis + 1)
        halves = left + right
    return jnp.squeeze(halves, axis + 1)


def _scattered(into: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return into.at[rows].add(values, mode="drop", wrap_negative_indices=False)
