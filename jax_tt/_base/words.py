"""Integers of 64 bits as two words, in case 64-bit types are disabled, and hashes of integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def added(words: jax.Array, more: jax.Array) -> jax.Array:
    """Totals, as low and high word ``[..., 2]``, plus uint32 ``more [...]``."""
    low, high = words[..., 0], words[..., 1]
    total = low + more
    carry = (total < low).astype(jnp.uint32)
    return jnp.stack([total, high + carry], axis=-1)


def integers(words: Any) -> np.ndarray:
    """Totals ``[..., 2]`` as uint64 ``[...]``, on the host."""
    low, high = np.moveaxis(np.asarray(words, np.uint64), -1, 0)
    return low + (high << np.uint64(32))


def set_of(keys: jax.Array, sets: int) -> jax.Array:
    """Set of each id, int32: its hash modulo the number of sets."""
    return (_hash(keys) % jnp.uint32(sets)).astype(jnp.int32)


def bucket_of(keys: jax.Array, sets: int, buckets: int) -> jax.Array:
    """Ghost bucket of each id, int32: one of the ``buckets / sets`` of its set."""
    return set_of(keys, sets) * (buckets // sets) + bucket_within_set(keys, sets, buckets)


def bucket_within_set(keys: jax.Array, sets: int, buckets: int) -> jax.Array:
    """Index of each id's bucket within its set, int32."""
    per_set = jnp.uint32(buckets // sets)
    return (_hash(keys) // jnp.uint32(sets) % per_set).astype(jnp.int32)


def _hash(keys: jax.Array) -> jax.Array:
    """The murmur3 finaliser of the two 32-bit words of each id; int32 and int64 hash alike for ids below 2^32."""
    low = keys.astype(jnp.uint32)
    if keys.dtype.itemsize == 8:
        low = low ^ mix((keys >> 32).astype(jnp.uint32))
    return mix(low)


def mix(word: Any) -> Any:
    """The murmur3 finaliser of words uint32, of JAX or of numpy."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def mix_wide(words: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser of integers; not the hash that determines the set of a row."""
    word = words.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
