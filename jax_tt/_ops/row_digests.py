"""Digests of rows, by which dumps tell what has changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.mix import mix, mix_wide


def row_digests(array: jax.Array) -> np.ndarray:
    """A number for every row of an array ``[N, ...]`` that changes with any of its bits, uint64 ``[N]``."""
    high, low = (np.asarray(words).astype(np.uint64) for words in _summed(array))
    return high << np.uint64(32) | low


def joined_digests(*digests: np.ndarray) -> np.ndarray:
    """One number in place of several, uint64 ``[N]``; their order counts."""
    found = np.zeros(digests[0].shape, np.uint64)
    for own in digests:
        found = mix_wide(found + own.astype(np.uint64))
    return found


@jax.jit
def _summed(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two sums uint32 ``[N]`` of the words of every row, mixed, times odd numbers that belong to their places."""
    bits = jax.lax.bitcast_convert_type(array, f"uint{min(8 * array.dtype.itemsize, 32)}")
    places = np.arange(np.prod(bits.shape[1:], dtype=int), dtype=np.uint32)
    salt, first, second = (
        (mix(np.uint32(3) * places + np.uint32(k)) | np.uint32(1)).reshape(1, *bits.shape[1:])
        for k in range(3)
    )
    words, zero = mix(bits.astype(jnp.uint32) ^ salt), np.uint32(0)
    return jax.lax.reduce(
        (words * first, words * second),
        (zero, zero),
        lambda x, y: (x[0] + y[0], x[1] + y[1]),
        tuple(range(1, bits.ndim)),
    )
