"""Places of the members of a set of ids: a bit for each id, and for each block of ids the members before it."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = TypeVar("Array", jax.Array, np.ndarray)

_WORD = 32
# Words in a block, beside its count: places take 1.0625 bits an id.
_WORDS = 16
_BLOCK = _WORD * _WORDS


def shape_of(n: int) -> tuple[int, int]:
    """Shape of the uint32 array for n ids."""
    return -(-n // _BLOCK), 1 + _WORDS


def mark_members(member: Array) -> Array:
    """The array uint32 `shape_of` for ids of which some are members, bool ``[n]``; of numpy where ``member`` is."""
    # A table that is made on the host would compile each of these operations for its sizes.
    xp: Any = np if isinstance(member, np.ndarray) else jnp
    blocks, _ = shape_of(len(member))
    bits = xp.pad(member, (0, blocks * _BLOCK - len(member))).astype(np.uint32)
    bits = bits.reshape(blocks, _WORDS, _WORD)
    words = xp.sum(bits << np.arange(_WORD, dtype=np.uint32)[None, None], axis=2, dtype=np.uint32)
    counts = xp.sum(bits, axis=(1, 2), dtype=np.uint32)
    before = xp.cumsum(counts, dtype=np.uint32) - counts
    return xp.concatenate([before[:, None], words], axis=1)


def find_members(places: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether ids ``[...]``, which must be in range, are members, and the number of members before each, int32."""
    wide = ids.astype(jnp.int32)[..., None]
    line = places.at[wide[..., 0] // _BLOCK].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
    words, word, bit = line[..., 1:], wide // _WORD % _WORDS, (wide % _WORD).astype(jnp.uint32)
    column = lax.broadcasted_iota(jnp.int32, words.shape, words.ndim - 1)
    here = jnp.where(column == word, np.uint32(1) << bit, np.uint32(0))
    below = jnp.where(column < word, ~np.uint32(0), jnp.where(column == word, here - 1, 0))
    before = jnp.sum(lax.population_count(words & below), axis=-1, dtype=jnp.uint32)
    return jnp.any(words & here != 0, axis=-1), (line[..., 0] + before).astype(jnp.int32)


def members_on_host(marks: np.ndarray, ids: range) -> tuple[np.ndarray, int]:
    """Which of consecutive ids, at least one, are members, bool ``[n]``, and the number of members before them.

    Inverts `mark_members` for the blocks of these ids alone.
    """
    first = ids.start // _BLOCK
    some, start = marks[first : -(-ids.stop // _BLOCK)], ids.start - first * _BLOCK
    words = np.ascontiguousarray(some[:, 1:]).astype("<u4").view(np.uint8).reshape(-1)
    members = np.unpackbits(words, bitorder="little").astype(bool)
    return members[start : start + len(ids)], int(some[0, 0]) + int(members[:start].sum())
