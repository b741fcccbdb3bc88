"""The devices that own the keys of hash tables, and keys on their way there.

A key travels as two words, the first of which takes the place of the row of another table: it says in which round the
key travels. The words are two rounds of a Feistel network of the words of the key, so that any set of keys has first
words that are spread evenly, and the owner gets the key back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.mix import mix

_SECOND, _OWNER = 0x7FEB352D, 0x846CA68B


def words_of(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words int32 ``[n]`` that keys uint32 ``[n, 2]`` travel as."""
    first, rest = _words(keys)
    return _signed(first), _signed(rest)


def keys_of_words(first: jax.Array, rest: jax.Array) -> jax.Array:
    """The inverse of `words_of`."""
    first, rest = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in (first, rest))
    low = first ^ mix(rest ^ np.uint32(_SECOND))
    return jnp.stack([rest ^ mix(low), low], axis=-1)


def owners_of(first: jax.Array, rest: jax.Array, devices: int) -> jax.Array:
    """The devices that keys with these words belong to, int32.

    The hash is another one than those that choose the sets of a table and the rounds of an exchange.
    """
    first, rest = (jax.lax.bitcast_convert_type(word, jnp.uint32) for word in (first, rest))
    return _owners(first, rest, devices)


def owners_of_keys(keys: np.ndarray, devices: int) -> np.ndarray:
    """`owners_of` of keys uint32 ``[n, 2]``, on the host."""
    return _owners(*_words(keys), devices)


def _words(keys: Any) -> tuple[Any, Any]:
    high, low = keys[:, 0], keys[:, 1]
    rest = high ^ mix(low)
    return low ^ mix(rest ^ np.uint32(_SECOND)), rest


def _owners(first: Any, rest: Any, devices: int) -> Any:
    mixed = mix(rest ^ mix(first ^ np.uint32(_OWNER)))
    return (mixed % np.uint32(devices)).astype(np.int32)


def _signed(words: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, jnp.int32)
