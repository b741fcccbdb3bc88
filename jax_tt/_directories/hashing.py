"""Hashes of 64-bit keys: the two sets that may hold them, the devices that own them, and words to send them as.

A key travels as two words, the first of which takes the place of the row of another table: it says in which round the
key travels. The words are two rounds of a Feistel network of the words of the key, so that any set of keys has first
words that are spread evenly, and the owner gets the key back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.words import mix

_SET, _WORD, _OWNER = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def homes_of(keys: Any, sets: int) -> tuple[Any, Any]:
    """The two sets of every key, int32 arrays of JAX or numpy like the keys; they may be the same.

    A set is a hash modulo the number of sets, so that a set splits in two when the number of sets doubles.

    Args:
        keys: uint32 ``[n, 2]``, the high word first.
        sets: number of sets.
    """
    high, low = keys[:, 0], keys[:, 1]
    hashes = mix(low ^ mix(high)), mix(high ^ mix(low ^ np.uint32(_SET)))
    first, second = ((word % np.uint32(sets)).astype(np.int32) for word in hashes)
    return first, second


def words_of(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words int32 ``[n]`` that keys uint32 ``[n, 2]`` travel as."""
    first, rest = _words(keys)
    return _signed(first), _signed(rest)


def keys_of_words(first: jax.Array, rest: jax.Array) -> jax.Array:
    """The inverse of `words_of`."""
    first, rest = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in (first, rest))
    low = first ^ mix(rest ^ np.uint32(_WORD))
    return jnp.stack([rest ^ mix(low), low], axis=-1)


def owners_of(first: jax.Array, rest: jax.Array, devices: int) -> jax.Array:
    """The devices that own the keys with these words, int32.

    The hash differs from the hashes that choose the sets of a table and the rounds of an exchange.
    """
    first, rest = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in (first, rest))
    return _owners(first, rest, devices)


def owners_of_keys(keys: np.ndarray, devices: int) -> np.ndarray:
    """`owners_of` of keys uint32 ``[n, 2]``, on the host."""
    return _owners(*_words(keys), devices)


def _words(keys: Any) -> tuple[Any, Any]:
    high, low = keys[:, 0], keys[:, 1]
    rest = high ^ mix(low)
    return low ^ mix(rest ^ np.uint32(_WORD)), rest


def _owners(first: Any, rest: Any, devices: int) -> Any:
    mixed = mix(rest ^ mix(first ^ np.uint32(_OWNER)))
    return (mixed % np.uint32(devices)).astype(np.int32)


def _signed(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.int32)
