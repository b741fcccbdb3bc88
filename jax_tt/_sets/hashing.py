"""Hashing of 64-bit keys to the two sets that may hold them."""

from typing import Any

import numpy as np

from jax_tt._base.mix import mix

_SECOND = 0x9E3779B9


def homes_of(keys: Any, sets: int) -> tuple[Any, Any]:
    """The two sets of every key, int32 arrays of JAX or numpy like the keys; they may be the same.

    A set is a hash modulo the number of sets, so that a set of a table is divided in two when its sets double.

    Args:
        keys: uint32 ``[n, 2]``, the high word first.
        sets: number of sets.
    """
    high, low = keys[:, 0], keys[:, 1]
    hashes = mix(low ^ mix(high)), mix(high ^ mix(low ^ np.uint32(_SECOND)))
    first, second = ((word % np.uint32(sets)).astype(np.int32) for word in hashes)
    return first, second
