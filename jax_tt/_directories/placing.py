"""Slots for the keys of a whole hash table, on the host: all of them, or an error before anything changes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jax_tt._directories.hash_directory import MAX_WAYS, KeyDirectory
from jax_tt._directories.hashing import homes_of, owners_of_keys
from jax_tt._jax.on_host import on_host

ENTRY = np.dtype(
    [("key", np.uint64), ("slot", np.int32), ("score", np.uint64), ("touched", np.int32)]
)

# More than 16 times the capacity: what has no room there may have none in any, since keys can share both hashes.
_TRIES = 24


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


def placed(entries: np.ndarray, sets: Sets, what: str, advice: str = "") -> np.ndarray:
    """The entries with slots in which lookups find their keys, whatever the load.

    Entries with a slot keep it where others can make room.

    Args:
        entries: distinct keys; their slots, or -1.
        sets: of the table.
        what: the argument and the keys, for the error.
        advice: what else the error says.

    Raises:
        ValueError: there is no room for all of them; the message has a capacity and ways that have.
    """
    # Of the same keys in another order, every one gets the same slot.
    order = np.argsort(entries["key"], kind="stable")
    slots = _slots(entries["key"][order], entries["slot"][order], sets)
    if lost := int(np.count_nonzero(slots < 0)):
        on = f" on {sets.devices} devices" if sets.devices > 1 else ""
        raise ValueError(
            f"{what}: {lost} of {len(entries)} keys find no room in {sets.capacity} rows with ways={sets.ways}{on}; "
            f"expected {_enough(entries['key'], sets)}.{advice}"
        )
    placed = entries.copy()
    placed["slot"][order] = slots
    return placed


def _enough(keys: np.ndarray, sets: Sets) -> str:
    """A capacity and ways with which all keys have room, if a few tries find them."""
    advice, rows, ways = [], max(sets.capacity, len(keys)), sets.ways
    unit = ways * sets.devices
    for _ in range(_TRIES):
        rows = -(-max(rows + 1, rows * 9 // 8) // unit) * unit
        if _have_room(keys, sets._replace(sets=rows // ways)):
            advice.append(f"a larger capacity, such as {rows}")
            break
    while (ways := 2 * ways) <= MAX_WAYS and sets.capacity % (ways * sets.devices) == 0:
        if _have_room(keys, sets._replace(sets=sets.capacity // ways, ways=ways)):
            advice.append(f"ways={ways}")
            break
    return ", or ".join(advice) or "a larger capacity and more ways"


def _have_room(keys: np.ndarray, sets: Sets) -> bool:
    """Whether counts of keys by set show that all keys have room, without the slots that `_slots` looks for.

    A set that no more keys hash to than it has slots takes all of them, which leaves fewer to other sets. Tables that
    are nearly full have room for keys of which these counts do not show it.
    """
    home, other = sets.homes(keys)
    while len(home):
        count = np.bincount(home, minlength=sets.sets)
        count += np.bincount(other[other != home], minlength=sets.sets)
        rest = (count[home] > sets.ways) & (count[other] > sets.ways)
        if rest.all():
            return False
        home, other = home[rest], other[rest]
    return True


def _slots(keys: np.ndarray, held: np.ndarray, sets: Sets) -> np.ndarray:
    """A slot for every key, int64 ``[n]``; -1 for as few as possible."""
    homes = sets.homes(keys)
    holds = held >= 0
    second = holds & (homes[1] == held // sets.ways)
    home, other = np.where(second, homes[::-1], homes)
    holds &= home == held // sets.ways
    home = _balanced(home, other, holds, sets)
    holds &= home == held // sets.ways
    free = np.ones(sets.capacity, bool)
    free[held[holds]] = False
    slots, (rest,) = np.where(holds, held, -1).astype(np.int64), np.nonzero(~holds)
    rest = rest[np.argsort(home[rest], kind="stable")]
    rank = _rank(home[rest])
    open_slots = np.flatnonzero(free)
    count = np.bincount(open_slots // sets.ways, minlength=sets.sets)
    first = np.cumsum(count) - count
    fits = rank < count[home[rest]]
    slots[rest[fits]] = open_slots[first[home[rest[fits]]] + rank[fits]]
    return slots


def _balanced(home: np.ndarray, other: np.ndarray, holds: np.ndarray, sets: Sets) -> np.ndarray:
    """A set for every key such that as few as possible are too many for their set.

    This is a maximum flow, by pushes to sets that are nearer to free slots: keys of sets with too many of them move to
    their other set, of which keys may have to move in turn.
    """
    while True:
        excess = np.bincount(home, minlength=sets.sets) - sets.ways
        distance = _distances(home, other, excess < 0)
        (moving,) = np.nonzero((excess[home] > 0) & (distance[other] < distance[home]))
        if not len(moving):
            return home
        moving = moving[np.lexsort((holds[moving], home[moving]))]
        moving = moving[_rank(home[moving]) < excess[home[moving]]]
        home, other = home.copy(), other.copy()
        home[moving], other[moving] = other[moving], home[moving]


def _distances(home: np.ndarray, other: np.ndarray, free: np.ndarray) -> np.ndarray:
    """How many keys have to move for a set to get a free slot; infinite where none can."""
    distance, step = np.where(free, 0, np.inf), 0
    while True:
        far = np.isinf(distance[home])
        home, other = home[far], other[far]
        reached = home[distance[other] == step]
        if not len(reached):
            return distance
        step += 1
        distance[reached] = step


def _rank(groups: np.ndarray) -> np.ndarray:
    """How many entries before each one are of the same group; the groups are in order."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)
