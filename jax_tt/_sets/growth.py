"""Growth of a directory to twice its sets, in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._sets.hash_directory import KeyDirectory
from jax_tt._sets.hashing import homes_of


def doubled(directory: KeyDirectory) -> tuple[KeyDirectory, jax.Array]:
    """The directory with twice the sets, and where its entries come from.

    A set is a hash modulo the number of sets, so the keys of set ``s`` go to sets ``s`` and ``s + sets``, where they
    take the ways from 0 up in the order in which they were: all of them have a place. A key stays in its first set, or
    in its second one.

    Args:
        directory: with less than 2^30 slots.

    Returns:
        The directory, and the old slot of every new one, int32 ``[2 * capacity]``; -1 for those that are empty.
    """
    sets, ways = directory.touched.shape
    words = directory.keys.transpose(0, 2, 1).reshape(-1, 2)
    first, second = (home.reshape(sets, ways) for home in homes_of(words, 2 * sets))
    own = jnp.arange(sets, dtype=jnp.int32)[:, None]
    above = jnp.where(first % sets == own, first, second) >= sets
    taken = directory.touched > 0
    goes = jnp.stack([taken & ~above, taken & above])
    way = jnp.argsort(~goes, axis=2, stable=True).astype(jnp.int32)
    here = jnp.take_along_axis(goes, way, axis=2)
    source = jnp.where(here, own[None] * ways + way, -1).reshape(-1)

    def of_words(array: jax.Array) -> jax.Array:
        moved = jnp.take_along_axis(array[None], way[:, :, None], axis=3)
        return jnp.where(here[:, :, None], moved, 0).reshape(2 * sets, 2, ways)

    touched = jnp.take_along_axis(directory.touched[None], way, axis=2)
    touched = jnp.where(here, touched, 0).reshape(2 * sets, ways)
    return KeyDirectory(of_words(directory.keys), of_words(directory.scores), touched), source
