"""Slots for the keys of a whole hash table, on the host: for as many as possible, the most valuable ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_tt._directories.hash_directory import MAX_WAYS, Eviction, KeyDirectory
from jax_tt._directories.hashing import homes_of, owners_of_keys
from jax_tt._directories.matching import Keys, balanced, most_valuable, rank
from jax_tt._jax.on_host import on_host

ENTRY = np.dtype(
    [("key", np.uint64), ("slot", np.int32), ("score", np.uint64), ("touched", np.int32)]
)

# What becomes of keys that find no room: they are evicted where the policy of the table evicts keys, or it is an error.
OVERFLOWS = ("evict", "error")

# How many sizes are tried one by one, and how many keys are distributed for that, at most: about a second.
_SIZES, _KEYS = 256, 1 << 22
# What has no room in a table so many times as large may have none in any, since keys can share both hashes.
_MOST = 16


class Sets(NamedTuple):
    """The sets of a table, whose slot ``s * ways + w`` is way w of set s.

    Attributes:
        sets: the number of sets of all devices, the sets of the first device first.
        ways: slots of a set.
        devices: the number of devices; all of them have as many sets.
    """

    sets: int
    ways: int
    devices: int = 1

    @property
    def capacity(self) -> int:
        return self.sets * self.ways

    def homes(self, keys: np.ndarray) -> np.ndarray:
        """The two sets of every key uint64 ``[n]``, int64 ``[2, n]``; they may be the same."""
        words, local = words_of_keys(keys), self.sets // self.devices
        first = owners_of_keys(words, self.devices).astype(np.int64) * local
        return np.stack([first + home for home in homes_of(words, local)])


def words_of_keys(keys: np.ndarray) -> np.ndarray:
    """uint64 ``[n]`` as uint32 ``[n, 2]``, high and low word."""
    return np.stack([keys >> np.uint64(32), keys & np.uint64(2**32 - 1)], axis=1).astype(np.uint32)


def entries_of(directory: KeyDirectory) -> np.ndarray:
    """The keys of a directory in the order of their slots, a structured array of `ENTRY`. Blocks until it is there."""
    keys, scores, touched = map(on_host, directory)
    (slots,) = np.nonzero(touched.reshape(-1))
    entries = np.empty(slots.size, ENTRY)
    entries["slot"] = slots
    entries["touched"] = touched.reshape(-1)[slots]
    for field, words in ("key", keys), ("score", scores):
        high, low = words.astype(np.uint64).transpose(1, 0, 2).reshape(2, -1)[:, slots]
        entries[field] = high << np.uint64(32) | low
    return entries


def directory_with(entries: np.ndarray, sets: Sets, label: str) -> KeyDirectory:
    """The directory, numpy arrays, with distinct keys in the slots of their entries."""

    def in_slots(words: np.ndarray) -> np.ndarray:
        of_slots = np.zeros((sets.capacity, 2), np.uint32)
        of_slots[entries["slot"]] = words
        return np.ascontiguousarray(of_slots.reshape(sets.sets, sets.ways, 2).transpose(0, 2, 1))

    touched = np.zeros(sets.capacity, np.int32)
    touched[entries["slot"]] = entries["touched"]
    if (count := np.count_nonzero(touched)) != len(entries):
        raise RuntimeError(f"{label}table: {count} of {len(entries)} keys would be left.")
    of_keys, of_scores = (in_slots(words_of_keys(entries[name])) for name in ("key", "score"))
    return KeyDirectory(of_keys, of_scores, touched.reshape(sets.sets, sets.ways))


def placed(
    entries: np.ndarray,
    sets: Sets,
    eviction: Eviction,
    clock: int,
    what: str,
    overflow: str = "evict",
) -> np.ndarray:
    """The entries with slots in which lookups find their keys, and -1 for those that find no room.

    Keys move between their two sets until as many as possible have room. Of keys that compete for slots, those leave
    that `hash_reference.insert` evicts first: with the lowest score, the earliest last batch and the smallest number,
    in this order, but those of batches within ``min_age`` after all others. Entries with a slot keep it where others
    can make room. The result does not depend on the order of the entries.

    Args:
        entries: distinct keys; their slots, or -1.
        sets: of the table.
        eviction: of the table.
        clock: the number of its last batch.
        what: the argument and the keys, for the error.
        overflow: one of `OVERFLOWS`.

    Raises:
        ValueError: there is no room for all of them, and none may be evicted; the message has a capacity and ways that
            have.
    """
    young = entries["touched"] > clock + 1 - eviction.min_age
    names = ("key", "touched", "score")
    order = np.lexsort((*(entries[name] for name in names), young))[::-1]
    slots = _slots(entries["key"][order], entries["slot"][order], sets)
    lost = int(np.count_nonzero(slots < 0))
    if lost and (overflow == "error" or eviction.policy == "none"):
        on = f" on {sets.devices} devices" if sets.devices > 1 else ""
        evicts = ', or overflow="evict"' if eviction.policy != "none" else ""
        raise ValueError(
            f"{what}: {lost} of {len(entries)} keys find no room in {sets.capacity} rows with ways={sets.ways}{on}; "
            f"expected {_enough(entries['key'], sets)}{evicts}."
        )
    placed = entries.copy()
    placed["slot"][order] = slots
    return placed


def _slots(keys: np.ndarray, held: np.ndarray, sets: Sets) -> np.ndarray:
    """A slot for every key, int64 ``[n]``; keys in order of falling value, -1 for those that find no room."""
    homes = sets.homes(keys)
    holds = held >= 0
    second = holds & (homes[1] == held // sets.ways)
    home, other = np.where(second, homes[::-1], homes)
    holds &= home == held // sets.ways
    home = most_valuable(Keys(home, other, holds), sets.sets, sets.ways)
    holds &= home == held // sets.ways
    free = np.ones(sets.capacity, bool)
    free[held[holds]] = False
    slots, (rest,) = np.where(holds, held, -1).astype(np.int64), np.nonzero(~holds & (home >= 0))
    rest = rest[np.argsort(home[rest], kind="stable")]
    open_slots = np.flatnonzero(free)
    count = np.bincount(open_slots // sets.ways, minlength=sets.sets)
    first = np.cumsum(count) - count
    slots[rest] = open_slots[first[home[rest]] + rank(home[rest])]
    return slots


def _enough(keys: np.ndarray, sets: Sets) -> str:
    """A capacity and ways with which all keys have room, if there are any."""
    advice, ways = [], sets.ways
    if (larger := _smallest(keys, sets)) is not None:
        advice.append(f"a capacity of {larger}")
    while (ways := 2 * ways) <= MAX_WAYS and sets.capacity % (ways * sets.devices) == 0:
        if _have_room(keys, sets._replace(sets=sets.capacity // ways, ways=ways)):
            advice.append(f"ways={ways}")
            break
    return ", or ".join(advice) or "a larger capacity and more ways"


def _smallest(keys: np.ndarray, sets: Sets) -> int | None:
    """The smallest larger capacity with which all keys have room; None if there seems to be none.

    With another number of sets, all keys are in other sets, so that there may be no room in a table that is larger than
    one that has room. Sizes are therefore tried one by one. Where that would take too long, steps double, and bisection
    of the last one ends at a size that has room while the next smaller one has not.
    """
    owners = sets.homes(keys)[0] // (sets.sets // sets.devices)
    # With so many sets on each device there is no room, as with all fewer ones.
    size = max(sets.sets // sets.devices, -(-np.bincount(owners).max() // sets.ways) - 1)
    most, singly = _MOST * (size + 1), min(_SIZES, _KEYS // len(keys))

    def have_room(size: int) -> bool:
        return _have_room(keys, sets._replace(sets=size * sets.devices))

    step = 1
    while not have_room(size + step):
        size, singly = size + step, singly - 1
        step = 1 if singly > 0 else 2 * step
        if size + step > most:
            return None
    low, high = size, size + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if have_room(middle) else (middle, high)
    return high * sets.devices * sets.ways


def _have_room(keys: np.ndarray, sets: Sets) -> bool:
    home, other = sets.homes(keys)
    # Most sizes have sets that too few keys hash to, which is seen without a search.
    count = np.bincount(home, minlength=sets.sets)
    count += np.bincount(other[other != home], minlength=sets.sets)
    if np.minimum(count, sets.ways).sum() < len(keys):
        return False
    spread = balanced(Keys(home, other, np.zeros(len(keys), bool)), sets.sets, sets.ways)
    return bool((np.bincount(spread.home) <= sets.ways).all())
