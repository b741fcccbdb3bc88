"""The number of the present batch of a directory, which is counted on from an earlier one before it runs out.

Hash tables and the places of tiers count on when a batch comes, row caches when they are populated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._directories.hash_directory import KEYS, WAITING, WITHIN_EPOCHS

# A batch after this many counts on from `KEPT`. `insert_sharded` marks keys with the largest int32.
LAST = 2**31 - 2
# What is counted on between batches counts on from here, and has many batches left until `LAST`.
SOON = 3 * 2**29
# Ages up to this one are exact, whatever the clock has been set back.
KEPT = 2**30
# In place of a word, for arrays all of whose entries are numbers of batches.
WHOLE = -1


def numbers_of_batches(state: Mapping[str, Any], policy: str) -> dict[str, int]:
    """The names of the arrays that hold numbers of batches, each with the word of scores that is one, or `WHOLE`.

    These are last batches, the scores of policies that compare them, and the scores of keys that wait.
    """
    words = {KEYS[2]: WHOLE, WAITING[2]: WHOLE, WAITING[1]: 0}
    if WITHIN_EPOCHS.get(policy, policy) == "lru":
        words[KEYS[1]] = 1
    return {name: word for name, word in words.items() if name in state}


def counted_on(clock: jax.Array, last: int = LAST) -> jax.Array:
    """The clock, which goes on from `KEPT` where it has come to ``last``."""
    return jnp.where(clock >= last, KEPT, clock)


def next_batch(clock: jax.Array) -> jax.Array:
    """The clock of the next batch, where it is counted on between batches; it stops at `LAST`."""
    return jnp.minimum(clock, LAST - 1) + 1


# Eager calls find the program again.
@partial(jax.jit, static_argnums=(2, 3), inline=True)
def set_back(
    clock: jax.Array, arrays: Sequence[jax.Array], words: tuple[int, ...], last: int = LAST
) -> list[jax.Array]:
    """Arrays of `numbers_of_batches`, set back to end at `KEPT`, where the clock has come to ``last``.

    Keys keep their order by age; the ages above `KEPT` become equal.
    """

    def full(carry: Any) -> jax.Array:
        return carry[0] >= last

    def less(carry: Any) -> Any:
        clock, arrays = carry
        after = [
            _less(array, clock - KEPT, word) for array, word in zip(arrays, words, strict=True)
        ]
        return jnp.full_like(clock, KEPT), after

    # Not a `cond`, whose results XLA does not always write in place.
    return lax.while_loop(full, less, (clock, list(arrays)))[1]


def _less(array: jax.Array, back: jax.Array, word: int) -> jax.Array:
    """The numbers of batches reduced by ``back``, at least 1 but for those that are 0."""
    back = back.astype(array.dtype)
    after = jnp.where(array > back, array - back, jnp.minimum(array, 1))
    if word == WHOLE:
        return after
    # Made from the array, so that it has the sharding of the array on a mesh with Explicit axes.
    shape = [1, array.shape[1], *[1] * (array.ndim - 2)]
    words = jnp.zeros_like(array) + np.arange(array.shape[1], dtype=array.dtype).reshape(shape)
    return jnp.where(words == word, after, array)
