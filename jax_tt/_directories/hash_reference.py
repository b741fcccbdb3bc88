"""Operations on the keys of a hash table and their rows in plain JAX. The native ops compute the same integers.

The effect of a batch depends on its keys, how often they occur and the scores given with them, but not on their order:
keys are made distinct first, and every round of an insertion handles the sets independently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._directories.cache_reference import rank_within
from jax_tt._directories.hash_directory import WITHIN_EPOCHS, Insertion, KeyDirectory
from jax_tt._directories.hashing import homes_of


def find(directory: KeyDirectory, keys: jax.Array, present: jax.Array) -> jax.Array:
    """Slot of every key, int32 ``[n]``; -1 for keys that are not there and for positions that are not present.

    Args:
        directory: the keys of the table.
        keys: uint32 ``[n, 2]``.
        present: bool ``[n]``.
    """
    slots = jnp.full(present.shape, -1, jnp.int32)
    for home in reversed(homes_of(keys, directory.sets)):
        same = jnp.all(directory.keys[home] == keys[:, :, None], axis=1)
        same &= directory.touched[home] > 0
        way = jnp.argmax(same, axis=1).astype(jnp.int32)
        there = jnp.any(same, axis=1) & present
        slots = jnp.where(there, home * directory.ways + way, slots)
    return slots


def holds(directory: KeyDirectory, keys: jax.Array, slots: jax.Array) -> jax.Array:
    """Whether each key, uint32 ``[n, 2]``, is in its slot, int32 ``[n]``; bool ``[n]``."""
    inside = (slots >= 0) & (slots < directory.capacity)
    # Flat arrays, of which XLA gathers single numbers the fastest; words have up to 2**32 places.
    at = jnp.where(inside, slots, 0).astype(jnp.uint32)
    high = at + at // np.uint32(directory.ways) * np.uint32(directory.ways)
    words = directory.keys.reshape(-1)
    same = (words[high] == keys[:, 0]) & (words[high + np.uint32(directory.ways)] == keys[:, 1])
    return inside & same & (directory.touched.reshape(-1)[at] > 0)


def insert(
    directory: KeyDirectory,
    keys: jax.Array,
    present: jax.Array,
    given: jax.Array,
    now: jax.Array,
    epoch: jax.Array,
    policy: str,
    min_age: int,
) -> tuple[KeyDirectory, Insertion]:
    """Finds or inserts the keys of a batch.

    A request for a known key marks it as touched ``now`` and updates its score:

    ============ ======================== =============================
    policy       high word                low word
    ============ ======================== =============================
    ``none``     0                        0
    ``lru``      0                        ``now``
    ``lfu``      0                        plus its requests, saturating
    ``epoch_lru`` ``epoch``               ``now``
    ``epoch_lfu`` ``epoch``               plus its requests, saturating
    ``custom``   the largest score that the batch gives for the key
    ============ ======================== =============================

    A new key has the score of a key with score 0 that is requested. New keys are inserted in up to four rounds, each
    with the keys that remain: into empty slots of the set that had fewer keys before the batch (its first set, if both
    have the same number), into empty slots of the other set, and, unless the policy is ``none``, in place of keys of
    these two sets in the same order.

    In a round, the keys of a set come in descending order of scores, then in ascending order of keys. They take the
    empty ways in ascending order; or they are paired with the keys that may be evicted, in ascending order of score,
    last batch and key, and replace those whose score is not above theirs. A key may be evicted if this batch does not
    request it and its last batch is at least ``min_age`` batches ago. Keys that find no place are refused.

    Args:
        directory: state before.
        keys: uint32 ``[n, 2]``.
        present: bool ``[n]``, the positions to insert.
        given: uint32 ``[n, 2]``, scores of the policy ``custom``; not looked at otherwise.
        now: int32 scalar, the number of this batch, above the numbers of all batches before.
        epoch: uint32 scalar, not looked at without epochs.
        policy: one of `POLICIES`.
        min_age: at least 1.

    Returns:
        The directory, and what was inserted and evicted.
    """
    distinct, counts, given = _distinct(keys, present, given)
    here = counts > 0
    flat = _Flat.of(directory)
    slots = find(directory, distinct, here)
    known = here & (slots >= 0)
    at = jnp.where(known, slots, directory.capacity)
    before = flat.scores.at[at].get(mode="fill", fill_value=0)
    scores = scored(before, counts, given, now, epoch, policy)
    flat = flat.written(at, distinct, scores, now)

    first, second = homes_of(distinct, directory.sets)
    occupied = jnp.sum(directory.touched > 0, axis=1)
    fewer = occupied[second] < occupied[first]
    sets = jnp.where(fewer, second, first), jnp.where(fewer, first, second)
    rounds = [(home, evict) for evict in (False, True) for home in sets]
    placed = jnp.full(counts.shape, directory.capacity, jnp.int32)
    old = _Flat(jnp.zeros_like(distinct), jnp.zeros_like(scores), jnp.zeros_like(counts))
    for home, evict in rounds if policy != "none" else rounds[:2]:
        waiting = here & ~known & (placed == directory.capacity)
        group = jnp.where(waiting, home, directory.sets)
        rank = rank_within(group, directory.sets, ~scores[:, 0], ~scores[:, 1])
        of_set = home[:, None] * directory.ways + jnp.arange(directory.ways, dtype=jnp.int32)[None]
        there = jax.tree.map(lambda array, at=of_set: array[at], flat)
        full = there.touched > 0
        open_to = full & (there.touched <= now - min_age) if evict else ~full
        order = (there.touched, *_columns(there.keys)) if evict else ()
        order = (*_columns(there.scores), *order) if evict else ()
        ways = jnp.lexsort((*reversed(order), ~open_to), axis=1)
        slot = jnp.take_along_axis(of_set, ways, axis=1)
        slot = slot.at[jnp.arange(rank.size), rank].get(mode="fill", fill_value=0)
        fits = waiting & (rank < jnp.sum(open_to, axis=1, dtype=jnp.int32))
        if evict:
            fits &= ~_below(scores, flat.scores[slot])
            leaving = jax.tree.map(lambda array, slot=slot: array[slot], flat)
            old = jax.tree.map(lambda new, was, fits=fits: _where(fits, new, was), leaving, old)
        at = jnp.where(fits, slot, directory.capacity)
        flat = flat.written(at, distinct, scores, now)
        placed = jnp.where(fits, slot, placed)

    waiting = here & ~known & (placed == directory.capacity)
    by = jnp.argsort(placed)
    kept = placed[by] < directory.capacity
    hits = jnp.sum(jnp.where(known, counts, 0))
    numbers = jnp.stack(
        [
            *(jnp.sum(present), hits, jnp.sum(here), jnp.sum(known)),
            *(jnp.sum(kept), jnp.sum(old.touched > 0), jnp.sum(waiting)),
        ]
    )
    old = jax.tree.map(lambda array: _where(kept, array[by], jnp.zeros_like(array)), old)
    new = _where(kept, distinct[by], jnp.zeros_like(distinct))
    after = flat.directory(directory)
    counts, slots = numbers.astype(jnp.int32), find(after, keys, present)
    return after, Insertion(placed[by], new, *old, counts=counts, found=slots)


def erase(directory: KeyDirectory, slots: jax.Array) -> KeyDirectory:
    """The directory without the keys of these slots, int32 ``[n]``; others than 0 to capacity - 1 are ignored."""
    at = jnp.where(slots < 0, directory.sets, slots // directory.ways), slots % directory.ways
    return KeyDirectory(
        directory.keys.at[at[0], :, at[1]].set(0, mode="drop"),
        directory.scores.at[at[0], :, at[1]].set(0, mode="drop"),
        directory.touched.at[at].set(0, mode="drop"),
    )


def scores_of(directory: KeyDirectory, slots: jax.Array) -> jax.Array:
    """Scores ``[n, 2]`` in these slots, int32 ``[n]``; 0 for negative ones."""
    at = jnp.where(slots < 0, directory.sets, slots // directory.ways), slots % directory.ways
    return directory.scores.at[at[0], :, at[1]].get(mode="fill", fill_value=0)


class _Flat(NamedTuple):
    """The arrays of a directory with one axis of slots, which comes first."""

    keys: jax.Array
    scores: jax.Array
    touched: jax.Array

    @classmethod
    def of(cls, directory: KeyDirectory) -> _Flat:
        keys, scores = (
            array.transpose(0, 2, 1).reshape(-1, 2) for array in (directory.keys, directory.scores)
        )
        return cls(keys, scores, directory.touched.reshape(-1))

    def directory(self, like: KeyDirectory) -> KeyDirectory:
        keys, scores = (
            array.reshape(like.sets, like.ways, 2).transpose(0, 2, 1)
            for array in (self.keys, self.scores)
        )
        return KeyDirectory(keys, scores, self.touched.reshape(like.sets, like.ways))

    def written(self, at: jax.Array, keys: jax.Array, scores: jax.Array, now: jax.Array) -> _Flat:
        new = (keys, scores, jnp.broadcast_to(now, at.shape))
        return _Flat(*(x.at[at].set(y, mode="drop") for x, y in zip(self, new, strict=True)))


def _distinct(
    keys: jax.Array, present: jax.Array, given: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The distinct keys in ascending order, their counts, and the largest score given for each.

    They are padded with counts of 0.
    """
    n = present.shape[0]
    absent = (~present).astype(jnp.uint32)
    by = (absent, *_columns(keys), *(~word for word in _columns(given)))
    absent, high, low, *scores = jax.lax.sort(by, num_keys=len(by))
    new = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    head = jnp.ones(n, bool).at[1:].set(new) & (absent == 0)
    run = jnp.cumsum(head) - 1
    here = jnp.where(absent == 0, run, n)
    counts = jnp.zeros(n, jnp.int32).at[here].add(1, mode="drop")
    heads = jnp.where(head, run, n)
    words = jnp.stack([high, low, *(~word for word in scores)], axis=1)
    first = jnp.zeros_like(words).at[heads].set(words, mode="drop")
    return first[:, :2], counts, first[:, 2:]


def scored(
    scores: jax.Array,
    counts: jax.Array,
    given: jax.Array,
    now: jax.Array,
    epoch: jax.Array,
    policy: str,
) -> jax.Array:
    """Scores ``[n, 2]`` after ``counts`` requests."""
    if policy == "custom":
        return given
    counts = counts.astype(jnp.uint32)
    more = jnp.minimum(counts, ~scores[:, 1])
    nothing = jnp.zeros_like(counts)
    low = {
        "none": nothing,
        "lru": jnp.broadcast_to(now.astype(jnp.uint32), counts.shape),
        "lfu": scores[:, 1] + more,
    }[WITHIN_EPOCHS.get(policy, policy)]
    high = jnp.broadcast_to(epoch, counts.shape) if policy in WITHIN_EPOCHS else nothing
    return jnp.stack([high, low], axis=1)


def _below(left: jax.Array, right: jax.Array) -> jax.Array:
    """``left < right`` of two-word numbers ``[n, 2]``."""
    (high, low), (other_high, other_low) = _columns(left), _columns(right)
    return (high < other_high) | ((high == other_high) & (low < other_low))


def _columns(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    return words[..., 0], words[..., 1]


def _where(chosen: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.where(chosen.reshape(-1, *(1,) * (left.ndim - 1)), left, right)


def doubled(directory: KeyDirectory) -> tuple[KeyDirectory, jax.Array]:
    """Doubles the sets of a directory.

    A set is a hash modulo the number of sets, so the keys of set ``s`` go to sets ``s`` and ``s + sets``, where they
    take the ways from 0 up in their order: all of them have a place. A key stays in its first set, or
    in its second one.

    Args:
        directory: with less than 2^30 slots.

    Returns:
        The directory, and the old slot of every new one, int32 ``[2 * capacity]``; -1 for empty slots.
    """
    sets, ways = directory.touched.shape
    words = directory.keys.transpose(0, 2, 1).reshape(-1, 2)
    first, second = (home.reshape(sets, ways) for home in homes_of(words, 2 * sets))
    here = jnp.arange(sets, dtype=jnp.int32)[:, None]
    above = jnp.where(first % sets == here, first, second) >= sets
    taken = directory.touched > 0
    goes = jnp.stack([taken & ~above, taken & above])
    way = jnp.argsort(~goes, axis=2, stable=True).astype(jnp.int32)
    filled = jnp.take_along_axis(goes, way, axis=2)
    source = jnp.where(filled, here[None] * ways + way, -1).reshape(-1)

    def of_words(array: jax.Array) -> jax.Array:
        moved = jnp.take_along_axis(array[None], way[:, :, None], axis=3)
        return jnp.where(filled[:, :, None], moved, 0).reshape(2 * sets, 2, ways)

    touched = jnp.take_along_axis(directory.touched[None], way, axis=2)
    touched = jnp.where(filled, touched, 0).reshape(2 * sets, ways)
    return KeyDirectory(of_words(directory.keys), of_words(directory.scores), touched), source


def exchange(
    arrays: Sequence[jax.Array], new: Sequence[jax.Array], slots: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Writes new entries into slots of arrays, and returns the old ones.

    Args:
        arrays: ``[capacity, ...]`` each: rows, and the optimizer state beside them.
        new: entries ``[n, ...]`` in the type of the array, or a scalar that all of them get.
        slots: int32 ``[n]``, distinct in ``[0, capacity)`` and then ``capacity``, which is skipped.

    Returns:
        The arrays, and their old entries ``[n, ...]``, zeros where a slot is skipped.
    """
    old = [array.at[slots].get(mode="fill", fill_value=0) for array in arrays]
    changed = [
        array.at[slots].set(jnp.broadcast_to(entries, (slots.size, *array.shape[1:])), mode="drop")
        for array, entries in zip(arrays, new, strict=True)
    ]
    return changed, old
