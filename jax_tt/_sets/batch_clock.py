"""The number of the present batch of a hash table, which is counted on from an earlier one before it runs out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._sets.hash_directory import CLOCK, KEYS, WAITING

# An insertion after this many batches counts on from `KEPT`. `insert_sharded` marks keys with the largest int32.
LAST = 2**31 - 2
# Ages up to this one are exact, whatever the clock has been set back.
KEPT = 2**30


def counted_on(state: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """The state with all numbers of batches set back to end at `KEPT`, where they have come to `LAST`.

    Keys keep their order by age; the ages above `KEPT` become equal. That changes last batches, the scores of policies
    that compare these, and the scores of keys that wait, whose high words they are.
    """
    words = {WAITING[1]: 0} | ({KEYS[1]: 1} if policy.removeprefix("epoch_") == "lru" else {})
    names = [CLOCK, *(n for n in (KEYS[2], WAITING[2], *words) if n in state)]
    after = _counted_on({name: state[name] for name in names}, tuple(words.items()))
    return {**state, **after}


# Eager calls find the program again.
@partial(jax.jit, static_argnums=1, inline=True)
def _counted_on(state: dict[str, Any], words_of: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """``state`` has the arrays that are set back alone, of which ``words_of`` are so in one word of scores."""
    words = dict(words_of)

    def full(arrays: dict[str, Any]) -> jax.Array:
        return arrays[CLOCK] >= LAST

    def set_back(arrays: dict[str, Any]) -> dict[str, Any]:
        back = arrays[CLOCK] - KEPT
        after = {
            name: _less(array, back, words[name]) if name in words else _less(array, back)
            for name, array in arrays.items()
        }
        return after | {CLOCK: jnp.full_like(arrays[CLOCK], KEPT)}

    # Not a `cond`, whose results XLA does not always write in place.
    return lax.while_loop(full, set_back, state)


def _less(array: jax.Array, back: jax.Array, word: int | None = None) -> jax.Array:
    """The numbers of batches reduced by ``back``, at least 1 but for those that are 0; only in one word of scores."""
    back = back.astype(array.dtype)
    after = jnp.where(array > back, array - back, jnp.minimum(array, 1))
    if word is None:
        return after
    # Made from the array, so that it has the sharding of the array on a mesh with Explicit axes.
    shape = [1, array.shape[1], *[1] * (array.ndim - 2)]
    words = jnp.zeros_like(array) + np.arange(array.shape[1], dtype=array.dtype).reshape(shape)
    return jnp.where(words == word, after, array)
