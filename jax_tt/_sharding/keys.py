"""Keys of hash tables on their way to the devices that own them.

A key travels as two words, the first of which takes the place of the row of another table: it says in which round the
key travels. The words are two rounds of a Feistel network of the words of the key, so that any set of keys has first
words that are spread evenly, and the owner gets the key back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._cache.hashing import mix

_SECOND, _OWNER = 0x7FEB352D, 0x846CA68B


def words_of(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words int32 ``[n]`` that keys uint32 ``[n, 2]`` travel as."""
    high, low = keys[:, 0], keys[:, 1]
    rest = high ^ mix(low)
    first = low ^ mix(rest ^ jnp.uint32(_SECOND))
    return _signed(first), _signed(rest)


def keys_of_words(first: jax.Array, rest: jax.Array) -> jax.Array:
    """The inverse of `words_of`."""
    first, rest = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in (first, rest))
    low = first ^ mix(rest ^ jnp.uint32(_SECOND))
    return jnp.stack([rest ^ mix(low), low], axis=-1)


def owners_of(first: jax.Array, rest: jax.Array, devices: int) -> jax.Array:
    """The devices that keys with these words belong to, int32.

    The hash is another one than those that choose the sets of a table and the rounds of an exchange.
    """
    first, rest = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in (first, rest))
    return (mix(rest ^ mix(first ^ jnp.uint32(_OWNER))) % jnp.uint32(devices)).astype(jnp.int32)


def _signed(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.int32)
