"""Hashing of 64-bit keys to the two sets that may hold them."""

import jax
import jax.numpy as jnp

from jax_tt._cache.hashing import mix

_SECOND = 0x9E3779B9


def homes_of(keys: jax.Array, sets: int) -> tuple[jax.Array, jax.Array]:
    """The two sets of every key, int32; they may be the same.

    A set is a hash modulo the number of sets, so that a set of a table is divided in two when its sets double.

    Args:
        keys: uint32 ``[n, 2]``, the high word first.
        sets: number of sets.
    """
    high, low = keys[:, 0], keys[:, 1]
    hashes = mix(low ^ mix(high)), mix(high ^ mix(low ^ jnp.uint32(_SECOND)))
    first, second = ((word % jnp.uint32(sets)).astype(jnp.int32) for word in hashes)
    return first, second
