"""What a hash table should hold, on one device or on several: the model of the long runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jax_tt._directories.admission import AdmitAfter, AdmitWithProbability
from jax_tt._directories.batch_clock import KEPT, LAST
from jax_tt._directories.hash_directory import COUNTERS
from jax_tt._kinds.sharded.route import message_rows
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.wrapper import is_sharded
from tests.kinds.hashed.hash_model import (
    MAX,
    ModelDirectory,
    owner,
    staying,
    travel_hash,
)

# Above the numbers of all batches.
_MARK = 2**31 - 1
Rows = dict[int, np.ndarray]
ByKey = dict[int, tuple[int, int]]


class Sizes(NamedTuple):
    """The number of sets of all devices, and of the sets of keys that wait."""

    sets: int
    waiting: int
    ways: int
    devices: int


def sizes_of(table: Any) -> Sizes:
    plain = unsharded(table)
    devices = table.mesh.size if is_sharded(table) else 1
    return Sizes(plain.sets, plain.waiting_sets, plain.ways, devices)


class Content(NamedTuple):
    """What a table holds, whatever its size: scores and last batches by key, and rows."""

    keys: ByKey
    waiting: ByKey
    rows: Rows
    now: int
    totals: dict[str, int]

    def merged(self, dump: Content) -> Content:
        """This with all keys of a dump."""
        waiting = self.waiting | dump.waiting
        return Content(
            self.keys | dump.keys,
            {key: entry for key, entry in waiting.items() if key not in self.keys | dump.keys},
            self.rows | dump.rows,
            max(self.now, dump.now),
            dump.totals,
        )

    def kept(self, table: ModelTable) -> Content:
        """This without the keys that find no room in a table."""
        sets, waiting, *rest = table.sizes
        stay = staying(self.keys, sets, *rest, now=self.now, min_age=table.min_age)
        wait = staying(self.waiting, waiting, *rest) if waiting else set()
        return self._replace(
            keys={key: self.keys[key] for key in stay},
            waiting={key: self.waiting[key] for key in wait},
            rows={key: self.rows[key] for key in stay},
        )


def by_key(directory: ModelDirectory) -> ByKey:
    return {key: (score, touched) for key, score, touched in directory.entries().values()}


class ModelTable:
    """Keys with their scores, last batches and rows, keys that wait for admission, and totals.

    Attributes:
        now: the number of the last batch.
        admission: of the table.
    """

    def __init__(self, table: Any) -> None:
        plain, self.sizes = unsharded(table), sizes_of(table)
        self.policy, self.min_age = plain.policy, plain.min_age
        sets, waiting, *rest = self.sizes
        self.directory, self.waiting = ModelDirectory(sets, *rest), ModelDirectory(waiting, *rest)
        self.rows: Rows = {}
        self.now, self.totals = 0, dict.fromkeys(COUNTERS, 0)
        self.admission, self.seed = plain.admission, plain.seed
        self.waiting_grows = (
            isinstance(self.admission, AdmitAfter) and self.admission.waiting is None
        )

    def content(self) -> Content:
        keys, waiting = by_key(self.directory), by_key(self.waiting)
        return Content(keys, waiting, dict(self.rows), self.now, dict(self.totals))

    def hold(self, content: Content, entries: np.ndarray, waiting: np.ndarray) -> None:
        """Takes over a content whose keys are in the slots of these entries, all of them in one of their sets."""
        self.rows, self.now, self.totals = dict(content.rows), content.now, dict(content.totals)
        for directory, given, expected in (
            (self.directory, entries, content.keys),
            (self.waiting, waiting, content.waiting if self.sizes.waiting else {}),
        ):
            directory.sets = [{} for _ in directory.sets]
            for key, slot, score, touched in given.tolist():
                assert slot // directory.ways in directory.homes(key)
                directory.sets[slot // directory.ways][slot % directory.ways] = [
                    key,
                    score,
                    touched,
                ]
            assert by_key(directory) == expected
            assert len(given) == len(expected)

    def insert(
        self, keys: list[int], given: list[int], epoch: int
    ) -> tuple[dict[int, tuple[int, list[int]]], dict[str, int]]:
        """Finds or inserts the keys of a batch; returns what was in every slot that has a new key, and counts."""
        self._count_on()
        self.now += 1
        rounds = rounds_of(keys, self.sizes.devices)
        if len(rounds) > 1:  # which must not evict the keys of each other
            for key in keys:
                for directory in (self.directory, self.waiting):
                    if directory.sets and (slot := directory.find(key)) >= 0:
                        directory.entry(slot)[2] = _MARK
                        break
        inserted: dict[int, tuple[int, list[int]]] = {}
        counts = dict.fromkeys(COUNTERS, 0)
        for here in rounds:
            some, more = self._insert(keys, here, given, epoch)
            inserted |= some
            counts = {name: count + more[name] for name, count in counts.items()}
        self.totals = {name: total + counts[name] for name, total in self.totals.items()}
        return inserted, counts

    def _insert(self, keys: list[int], here: list[bool], given: list[int], epoch: int) -> Any:
        """One round of an insertion."""
        if self.admission is None:
            return self._put(keys, here, given, epoch)
        pairs = list(zip(keys, here, strict=True))
        missed = [there and self.directory.find(key) < 0 for key, there in pairs]
        if isinstance(self.admission, AdmitWithProbability):
            lucky = lucky_keys(keys, self.seed, self.now, self.admission.probability)
            admitted = [
                there and (key in lucky or not new)
                for (key, there), new in zip(pairs, missed, strict=True)
            ]
            inserted, counts = self._put(keys, admitted, given, epoch)
            new = {key for key, is_new in zip(keys, missed, strict=True) if is_new}
            counts |= {
                "requests": counts["hits"] + sum(missed),
                "unique": counts["unique_hits"] + len(new),
            }
            return inserted, counts
        nothing = [0] * len(keys)
        _, waited = self.waiting.insert(keys, missed, nothing, self.now, self.now, "epoch_lfu", 1)
        new = {key for key, there in zip(keys, missed, strict=True) if there}
        slots = {key: slot for key in new if (slot := self.waiting.find(key)) >= 0}
        enough = {
            key: slot
            for key, slot in slots.items()
            if self.waiting.entry(slot)[1] & MAX >= self.admission.requests
        }
        self.waiting.erase(enough.values())
        admitted = [there and (key not in new or key in enough) for key, there in pairs]
        inserted, counts = self._put(keys, admitted, given, epoch)
        counts |= {
            "requests": counts["hits"] + waited["requests"],
            "unique": counts["unique_hits"] + waited["unique"],
        }
        return inserted, counts

    def _put(self, keys: list[int], here: list[bool], given: list[int], epoch: int) -> Any:
        return self.directory.insert(keys, here, given, self.now, epoch, self.policy, self.min_age)

    def _count_on(self) -> None:
        """Sets the numbers of all batches back before they run out."""
        if self.now < LAST:
            return
        back, self.now = self.now - KEPT, KEPT

        def less(number: int) -> int:
            return number - back if number > back else min(number, 1)

        for entry in self.directory.entries().values():
            entry[2] = less(entry[2])
            if self.policy.removeprefix("epoch_") == "lru":
                entry[1] = entry[1] >> 32 << 32 | less(entry[1] & MAX)
        for entry in self.waiting.entries().values():
            entry[1:] = less(entry[1] >> 32) << 32 | entry[1] & MAX, less(entry[2])

    def double(self) -> None:
        self.directory = self.directory.doubled()
        if self.waiting_grows:
            self.waiting = self.waiting.doubled()
        sets = {"sets": len(self.directory.sets), "waiting": len(self.waiting.sets)}
        self.sizes = self.sizes._replace(**sets)


def lucky_keys(keys: list[int], seed: int, now: int, probability: float) -> set[int]:
    """The keys that a batch with this number admits."""
    most = int(probability * 2**32) - 1
    first, second = threefry(*_words(seed % 2**64), now, 1)
    return {key for key in keys if threefry(first, second, *_words(key))[0] <= most}


def _words(number: int) -> tuple[int, int]:
    return number >> 32, number & MAX


def threefry(key: int, other_key: int, first: int, second: int) -> tuple[int, int]:
    """Threefry-2x32 with 20 rounds of a counter of two words under a key of two words."""
    schedule = key, other_key, key ^ other_key ^ 0x1BD11BDA
    first, second = (first + key) & MAX, (second + other_key) & MAX
    for part in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[part % 2]:
            first = (first + second) & MAX
            second = (second << turn & MAX | second >> 32 - turn) ^ first
        first = (first + schedule[(part + 1) % 3]) & MAX
        second = (second + schedule[(part + 2) % 3] + part + 1) & MAX
    return first, second


def rounds_of(keys: list[int], devices: int) -> list[list[bool]]:
    """Which keys travel in each round of an insertion; as a rule, all of them in one."""
    if devices == 1:
        return [[True] * len(keys)]
    share = len(keys) // devices
    size, bits = message_rows(share, devices), 0
    for first in range(0, len(keys), share):
        of_owners: dict[int, list[int]] = {}
        for key in set(keys[first : first + share]):
            of_owners.setdefault(owner(key, devices), []).append(travel_hash(key))
        for hashes in map(sorted, of_owners.values()):
            for low, high in zip(hashes, hashes[size:], strict=False):
                bits = max(bits, 33 - (low ^ high).bit_length())
    turns = [travel_hash(key) >> (32 - bits) for key in keys]
    return [[turn == k for turn in turns] for k in sorted(set(turns))]
