"""A directory of keys as Python dicts, one per set: the model that the ops are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jax_tt._directories.hash_directory import COUNTERS

MAX = 2**32 - 1


def joined(words) -> np.ndarray:
    """uint64 from words uint32 ``[..., 2]``, the high one first."""
    high, low = np.moveaxis(np.asarray(words, np.uint64), -1, 0)
    return high << np.uint64(32) | low


def _mix(word: int) -> int:
    word = (word ^ (word >> 16)) * 0x85EBCA6B & MAX
    word = (word ^ (word >> 13)) * 0xC2B2AE35 & MAX
    return word ^ (word >> 16)


@functools.lru_cache(1 << 17)
def homes(key: int, sets: int, devices: int = 1) -> tuple[int, int]:
    """The sets that may hold a key, both of the device that owns it; the sets of the first device come first."""
    high, low, local = key >> 32, key & MAX, sets // devices
    first = owner(key, devices) * local
    return (
        first + _mix(low ^ _mix(high)) % local,
        first + _mix(high ^ _mix(low ^ 0x9E3779B9)) % local,
    )


def owner(key: int, devices: int) -> int:
    """The device that has a key."""
    first, rest = _words(key)
    return _mix(rest ^ _mix(first ^ 0x846CA68B)) % devices


@functools.lru_cache(1 << 17)
def travel_hash(key: int) -> int:
    """The hash whose leading bits say in which round a key travels to its device."""
    return _mix(_words(key)[0])


def _words(key: int) -> tuple[int, int]:
    high, low = key >> 32, key & MAX
    rest = high ^ _mix(low)
    return low ^ _mix(rest ^ 0x7FEB352D), rest


def with_room(
    ranked: Iterable[int], homes_of: Callable[[int], tuple[int, int]], ways: int
) -> set[int]:
    """The keys that stay, of keys that come one by one: those that have room beside the ones that stay before them.

    Those before may move between their sets for that.
    """
    held: dict[int, set[int]] = {}
    full: set[int] = set()  # and no key there can make room, ever after
    kept = set()
    for key in ranked:
        came: dict[int, tuple[int, int]] = dict.fromkeys(homes_of(key), (-1, key))
        came = {home: step for home, step in came.items() if home not in full}
        free, queue = None, list(came)
        for home in queue:
            own = held.setdefault(home, set())
            if len(own) < ways:
                free = home
                break
            for other in own:
                for next_home in homes_of(other):
                    if next_home not in came and next_home not in full:
                        came[next_home] = home, other
                        queue.append(next_home)
        if free is None:
            full |= came.keys()
            continue
        kept.add(key)
        while free >= 0:
            before, moving = came[free]
            if before >= 0:
                held[before].remove(moving)
            held[free].add(moving)
            free = before
    return kept


def staying(
    keys: Mapping[int, tuple[int, int]],
    sets: int,
    ways: int,
    devices: int = 1,
    *,
    now: int = 0,
    min_age: int = 1,
) -> set[int]:
    """The keys, with their scores and last batches, that find room in a table with so many batches."""

    def value(key: int) -> tuple[bool, int, int, int]:
        score, touched = keys[key]
        return touched > now + 1 - min_age, score, touched, key

    ranked = sorted(keys, key=value, reverse=True)
    return with_room(ranked, lambda key: homes(key, sets, devices), ways)


class ModelDirectory:
    """Slots by set: way -> [key, score, touched]; scores are 64-bit integers."""

    def __init__(self, sets: int, ways: int, devices: int = 1):
        self.ways, self.devices = ways, devices
        self.sets: list[dict[int, list[int]]] = [{} for _ in range(sets)]

    def find(self, key: int) -> int:
        for home in self.homes(key):
            for way, entry in self.sets[home].items():
                if entry[0] == key:
                    return home * self.ways + way
        return -1

    def homes(self, key: int) -> tuple[int, int]:
        return homes(key, len(self.sets), self.devices)

    def entries(self) -> dict[int, list[int]]:
        """All entries by slot."""
        return {
            number * self.ways + way: entry
            for number, own in enumerate(self.sets)
            for way, entry in own.items()
        }

    def entry(self, slot: int) -> list[int]:
        return self.sets[slot // self.ways][slot % self.ways]

    def scored(self, score, count, given, now, epoch, policy) -> int:
        if policy == "custom":
            return given
        high = epoch if policy.startswith("epoch_") else 0
        kind = policy.removeprefix("epoch_")
        low = {"none": 0, "lru": now, "lfu": min((score & MAX) + count, MAX)}[kind]
        return high << 32 | low

    def insert(self, keys, present, given, now, epoch, policy, min_age):
        counts: dict[int, int] = {}
        best: dict[int, int] = {}
        for key, here, score in zip(keys, present, given, strict=True):
            if here:
                counts[key] = counts.get(key, 0) + 1
                best[key] = max(best.get(key, 0), score)
        known = {key: slot for key in counts if (slot := self.find(key)) >= 0}
        waiting, scores = [], {}
        occupied = [len(own) for own in self.sets]
        for key in sorted(counts):
            before = self.entry(known[key])[1] if key in known else 0
            scores[key] = self.scored(before, counts[key], best[key], now, epoch, policy)
            if key in known:
                self.entry(known[key])[1:] = [scores[key], now]
            else:
                waiting.append(key)
        sides = {}
        for key in waiting:
            first, second = self.homes(key)
            sides[key] = (second, first) if occupied[second] < occupied[first] else (first, second)
        inserted: dict[int, tuple[int, list[int]]] = {}
        for evict in (False, True) if policy != "none" else (False,):
            for side in range(2):
                waiting = self._round(waiting, sides, side, evict, scores, now, min_age, inserted)
        evicted = [old for _, old in inserted.values() if old[2]]
        hits = sum(counts[key] for key in known)
        numbers = (
            *(sum(map(bool, present)), hits, len(counts), len(known)),
            *(len(inserted), len(evicted), len(waiting)),
        )
        return inserted, dict(zip(COUNTERS, numbers, strict=True))

    def _round(self, waiting, sides, side, evict, scores, now, min_age, inserted):
        by_set: dict[int, list[int]] = {}
        for key in sorted(waiting, key=lambda key: (-scores[key], key)):
            by_set.setdefault(sides[key][side], []).append(key)
        left = []
        for home, keys in by_set.items():
            own = self.sets[home]
            if evict:
                old = [w for w, entry in own.items() if entry[2] <= now - min_age]
                ways = sorted(old, key=lambda w, own=own: (*own[w][1:], own[w][0]))
            else:
                ways = [way for way in range(self.ways) if way not in own]
            for rank, key in enumerate(keys):
                if rank >= len(ways) or (evict and own[ways[rank]][1] > scores[key]):
                    left.append(key)
                    continue
                way = ways[rank]
                inserted[home * self.ways + way] = key, own.get(way, [0, 0, 0])
                own[way] = [key, scores[key], now]
        return left

    def erase(self, slots) -> None:
        for slot in slots:
            if 0 <= slot < len(self.sets) * self.ways:
                self.sets[slot // self.ways].pop(slot % self.ways, None)

    def doubled(self) -> ModelDirectory:
        """With twice the sets: keys keep their first set, or their second one, and the order of their ways."""
        after = ModelDirectory(2 * len(self.sets), self.ways, self.devices)
        local = len(self.sets) // self.devices
        for number, own in enumerate(self.sets):
            for _, entry in sorted(own.items()):
                first, second = after.homes(entry[0])
                target = after.sets[first if first % local == number % local else second]
                target[len(target)] = entry
        return after

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys and scores uint64 ``[sets, ways]``, and last batches."""
        entries = np.zeros((3, len(self.sets), self.ways), np.uint64)
        for home, own in enumerate(self.sets):
            for way, entry in own.items():
                entries[:, home, way] = entry
        return entries[0], entries[1], entries[2].astype(np.int32)
