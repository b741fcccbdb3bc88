"""The row cache's policy once more, as dicts and in words of its own, and a driver that holds the ops to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._directories.cache_directory import (
    COUNTERS,
    CacheDirectory,
    add_to_statistics,
    init_directory,
)
from jax_tt._directories.scores import Scoring, aged
from jax_tt._kinds.cached.keys import count_batch
from jax_tt._native import cache_backend

TOP = 2**31 - 1
SCORINGS = {"lfu": Scoring("lfu"), "aging lfu": Scoring("lfu", half_life=3), "lru": Scoring("lru")}
_WORD = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sets, ways, buckets of a set, ghosts of a bucket, and how many different ids are asked for."""

    sets: int
    ways: int
    buckets: int
    room: int
    ids: int


SIZES = {
    "one of each": Sizes(1, 1, 1, 1, 6),
    "one set": Sizes(1, 3, 1, 4, 20),
    "ghosts in buckets": Sizes(1, 4, 3, 4, 40),
    "odd": Sizes(3, 5, 2, 7, 90),
    "short of room": Sizes(4, 2, 3, 2, 120),
    "many sets": Sizes(8, 4, 4, 4, 300),
}
# Of keys in a batch; those of a few are padded, so that each op is compiled few times.
BATCHES = (0, 6, 48)


@dataclasses.dataclass
class Count:
    """How hot one id is: its score, the last step, and requests in it. LRU has both of them in the score."""

    score: Any
    touched: int
    recent: int = 0


def mixed(word: int) -> int:
    """MurmurHash3's last step of 32 bits."""
    word ^= word >> 16
    word = word * 0x85EBCA6B & _WORD
    word ^= word >> 13
    word = word * 0xC2B2AE35 & _WORD
    return word ^ word >> 16


class Model:
    """The policy for Python ints. ``slots[set][way]`` is an id or None; every id has one `Count` at most."""

    def __init__(self, sizes: Sizes, scoring: Scoring) -> None:
        self.sizes, self.scoring = sizes, scoring
        self.lru = scoring.policy == "lru"
        self.reset()

    def reset(self) -> None:
        sizes = self.sizes
        self.clock = self.refreshed = self.unaged = 0
        self.slots: list[list[int | None]] = [[None] * sizes.ways for _ in range(sizes.sets)]
        self.rows: dict[int, Count] = {}
        self.ghosts: list[list[dict[int, Count]]] = [
            [{} for _ in range(sizes.buckets)] for _ in range(sizes.sets)
        ]
        self.totals: Counter[str] = Counter()
        self.requests: Counter[int] = Counter()  # what nothing but the model can know

    def home(self, row: int) -> tuple[int, int]:
        """Set and bucket of an id."""
        word = mixed(row & _WORD ^ mixed(row >> 32))
        return word % self.sizes.sets, word // self.sizes.sets % self.sizes.buckets

    def probe(self, keys: list[int]) -> list[int]:
        found = []
        for key in keys:
            s, _ = self.home(max(key, 0))
            held = key >= 0 and key in self.slots[s]
            found.append(s * self.sizes.ways + self.slots[s].index(key) if held else -1)
        return found

    def halve(self) -> None:
        """Halves all scores as often as half-lives have ended; no row that was counted is left with nothing."""
        ended, _ = self.half_lives()
        for count in self._counts():
            count.score = max(count.score // 2**ended, 1)
        self.unaged %= (self.scoring.half_life or 0) * self.sizes.sets * self.sizes.ways

    def halve_late(self) -> None:
        if self.scoring.half_life and self.half_lives()[0] > 4:
            self.halve()

    def observe(self, keys: list[int]) -> None:
        self.clock += 1
        self.halve_late()
        asked = Counter(key for key in keys if key >= 0)
        missed = {row: n for row, n in asked.items() if row not in self.rows}
        self.requests.update(asked)
        self.totals.update(
            calls=1,
            requested=asked.total(),
            unique=len(asked),
            misses=sum(missed.values()),
            unique_misses=len(missed),
        )
        crowded = set()
        for row, n in asked.items():
            if row not in missed:
                count = self.rows[row]
            else:
                s, b = self.home(row)
                count = self.ghosts[s][b].setdefault(row, Count((0, 0) if self.lru else 0, 0))
                count.recent = n
                crowded.add((s, b))
            if self.lru:
                count.score = (self.clock, min(n, 1023))
            else:
                count.score = min(count.score + n * self.worth(), TOP)
            count.touched = self.clock
        self.unaged += asked.total()
        for s, b in crowded:
            self.ghosts[s][b] = self._with_room(self.ghosts[s][b])

    def half_lives(self) -> tuple[int, int]:
        """Half-lives to make up for, and how many 1024ths of the next one have passed."""
        half_life = (self.scoring.half_life or 0) * self.sizes.sets * self.sizes.ways
        ended, begun = divmod(self.unaged, half_life)
        return ended, begun * 1024 // half_life

    def worth(self) -> int:
        """What LFU adds for one request: twice as much a half-life later, in a straight line between."""
        if self.scoring.half_life is None:
            return 1
        ended, begun = self.half_lives()
        return (1024 + begun) * 2**ended

    def _with_room(self, bucket: dict[int, Count]) -> dict[int, Count]:
        room = self.sizes.room
        best = sorted(sorted(bucket), key=lambda row: bucket[row].score, reverse=True)
        if len(best) <= room:
            return bucket
        if self.lru:  # the longest unseen go
            return {row: bucket[row] for row in best[:room]}
        paid = bucket[best[room]].score  # all give what the first one beyond the room has
        for count in bucket.values():
            count.score -= paid
        return {row: bucket[row] for row in best if bucket[row].score > 0}

    def populate(self) -> dict[int, int]:
        """Lets hot ghosts in; the row that left each slot."""
        left: dict[int, int] = {}
        self.totals["refreshes"] += 1
        for s in range(self.sizes.sets):
            left |= {s * self.sizes.ways + way: row for way, row in self._populate_set(s)}
        outside = [
            count
            for buckets in self.ghosts
            for bucket in buckets
            for count in bucket.values()
            if count.touched == self.clock
        ]
        self.totals["evicted"] += len(left)
        self.totals["conflict_unique_misses"] += len(outside)
        self.totals["conflict_misses"] += sum(count.recent for count in outside)
        if self.scoring.half_life:
            self.halve()
        self.refreshed = self.clock
        return left

    def _counts(self) -> list[Count]:
        buckets = [bucket for of_set in self.ghosts for bucket in of_set]
        return [count for counts in (self.rows, *buckets) for count in counts.values()]

    def _populate_set(self, s: int) -> list[tuple[int, int]]:
        ghosts = {row: count for bucket in self.ghosts[s] for row, count in bucket.items()}
        hottest = sorted(
            sorted(ghosts), key=lambda r: (ghosts[r].score, ghosts[r].touched), reverse=True
        )
        slots = self.slots[s]
        empty = [way for way, row in enumerate(slots) if row is None]
        cold = [
            (self.rows[row].score, self.rows[row].touched, way)
            for way, row in enumerate(slots)
            if row is not None and self.rows[row].touched != self.clock
        ]
        left = []
        for row, way in zip(hottest, empty + [way for *_, way in sorted(cold)], strict=False):
            old, new = slots[way], ghosts[row]
            if old is not None:
                held = self.rows[old]
                if (new.score, new.touched) <= (held.score, held.touched):
                    break
                left.append((way, old))
            slots[way] = row
            self.rows[row] = Count(new.score, new.touched)
            del self.ghosts[s][self.home(row)[1]][row]
            self.totals["inserted"] += 1
        for _, row in left:
            self._become_ghost(row, self.rows.pop(row))
        return left

    def _become_ghost(self, row: int, count: Count) -> None:
        s, b = self.home(row)
        bucket = self.ghosts[s][b]
        bucket[row] = count
        if len(bucket) > self.sizes.room:
            del bucket[min(bucket, key=lambda r: (bucket[r].score, -r))]

    def resize(self, sizes: Sizes, scoring: Scoring) -> None:
        """Other places, and perhaps another policy, for which a half-life begins."""
        self.halve_late()
        buckets = [bucket for of_set in self.ghosts for bucket in of_set]
        ghosts = {row: count for bucket in buckets for row, count in bucket.items()}
        rows, worth = self.rows, self.worth()
        for count in (*rows.values(), *ghosts.values()):
            count.score = self._converted(count, scoring, worth)
        clock, refreshed, totals = self.clock, self.refreshed, self.totals
        self.sizes, self.scoring, self.lru = sizes, scoring, scoring.policy == "lru"
        self.reset()
        self.clock, self.refreshed, self.totals = clock, refreshed, totals
        taken = [0] * sizes.sets
        for row in sorted(
            sorted(rows), key=lambda r: (rows[r].score, rows[r].touched), reverse=True
        ):
            s, _ = self.home(row)
            if taken[s] < sizes.ways:
                self.slots[s][taken[s]], self.rows[row] = row, rows[row]
                taken[s] += 1
            else:
                ghosts[row] = rows[row]
        for row in sorted(ghosts, key=lambda r: (ghosts[r].score, -r), reverse=True):
            s, b = self.home(row)
            if len(self.ghosts[s][b]) < sizes.room:
                self.ghosts[s][b][row] = ghosts[row]

    def _converted(self, count: Count, new: Scoring, worth: int) -> Any:
        if new.policy == "lru":
            return count.score if self.lru else (count.touched, min(count.recent, 1023))
        unit = 1024 if new.half_life else 1
        if self.lru:
            return count.score[1] * unit
        return max(count.score * unit // worth, 1)

    def heat(self, every: int, below: int) -> None:
        """Scores near the end of their range, as after years of counting."""
        buckets = [bucket for of_set in self.ghosts for bucket in of_set]
        for counts in (self.rows, *buckets):
            for row, count in counts.items():
                if row % every == 0:
                    count.score = TOP - (row + below) % 50

    def stored(self, count: Count) -> int:
        """The score as a directory holds it: LRU's relative to the last populate, with the requests in the low bits."""
        if not self.lru:
            return count.score
        step, requests = count.score
        return (step - self.refreshed) * 1024 + requests

    def check_promises(self) -> None:
        """What the policy promises, whatever its rules."""
        cached = [row for of_set in self.slots for row in of_set if row is not None]
        ghosts = [row for of_set in self.ghosts for bucket in of_set for row in bucket]
        assert len(cached) == len(set(cached)) and set(cached) == set(self.rows)
        assert len(ghosts) == len(set(ghosts)) and not set(ghosts) & set(cached)
        assert all(len(bucket) <= self.sizes.room for of_set in self.ghosts for bucket in of_set)


class Subject:
    """A directory and the ops on it, each compiled once."""

    def __init__(self, sizes: Sizes, scoring: Scoring, method: str, dtype: str = "int32") -> None:
        self.sizes, self.scoring, self.method, self.dtype = sizes, scoring, method, dtype
        self.reset()

    def reset(self) -> None:
        sizes = self.sizes
        self.directory = init_directory(
            sizes.sets, sizes.ways, sizes.sets * sizes.buckets, sizes.room, self.dtype
        )

    def probe(self, keys: list[int]) -> list[int]:
        found = _probe(self.directory.tags, self._keys(keys), self.method)
        return found[: len(keys)].tolist()

    def observe(self, keys: list[int]) -> None:
        self.directory = _observe(self.directory, self._keys(keys), self.scoring, self.method)

    def populate(self) -> dict[int, int]:
        self.directory, evicted = _populate(self.directory, self.scoring, self.method)
        return {slot: row for slot, row in enumerate(evicted.reshape(-1).tolist()) if row != -1}

    def heat(self, every: int, below: int) -> None:
        def heated(tags: np.ndarray, scores: np.ndarray) -> np.ndarray:
            chosen = (tags >= 0) & (tags % every == 0)
            return np.where(chosen, TOP - (tags + below) % 50, scores).astype(np.int32)

        state = jax.device_get(self.directory)
        self.directory = self.directory._replace(
            scores=jnp.asarray(heated(state.tags, state.scores)),
            ghost_scores=jnp.asarray(heated(state.ghost_tags, state.ghost_scores)),
        )

    def _keys(self, keys: list[int]) -> np.ndarray:
        more = BATCHES[-1] - len(keys) if keys else 0
        return np.array([*keys, *[-1] * more], self.dtype)


@partial(jax.jit, static_argnames="method")
def _probe(tags: jax.Array, keys: np.ndarray, method: str) -> jax.Array:
    return cache_backend.probe(tags, keys, method)


@partial(jax.jit, static_argnames=("scoring", "method"), donate_argnums=0)
def _observe(
    state: CacheDirectory, keys: np.ndarray, scoring: Scoring, method: str
) -> CacheDirectory:
    return count_batch(state, keys, cache_backend.probe(state.tags, keys, method), scoring, method)


@partial(jax.jit, static_argnames=("scoring", "method"), donate_argnums=0)
def _populate(
    state: CacheDirectory, scoring: Scoring, method: str
) -> tuple[CacheDirectory, jax.Array]:
    state, evicted, counts = cache_backend.populate(state, method)
    state = aged(state, scoring)
    names = ("inserted", "evicted", "conflict_unique_misses", "conflict_misses")
    return add_to_statistics(state, refreshes=1, **dict(zip(names, counts, strict=True))), evicted


def compare(model: Model, directory: CacheDirectory) -> None:
    """Every array of the directory means what the model holds; where in its bucket a ghost lies means nothing."""
    state = jax.tree.map(lambda leaf: leaf.tolist(), jax.device_get(directory))
    assert (state.clock, state.refreshed) == (model.clock, model.refreshed)
    assert state.unaged == model.unaged
    for s, slots in enumerate(model.slots):
        counts = [None if row is None else model.rows[row] for row in slots]
        assert state.tags[s] == [-1 if row is None else row for row in slots]
        assert state.scores[s] == [model.stored(count) if count else 0 for count in counts]
        assert state.touched[s] == [count.touched if count else 0 for count in counts]
    buckets = [bucket for of_set in model.ghosts for bucket in of_set]
    arrays = (state.ghost_tags, state.ghost_scores, state.ghost_touched, state.ghost_recent)
    for bucket, *places in zip(buckets, *arrays, strict=True):
        held = [(row, model.stored(c), c.touched, c.recent) for row, c in bucket.items()]
        held += [(-1, 0, 0, 0)] * (model.sizes.room - len(held))
        assert sorted(zip(*places, strict=True)) == sorted(held)
    totals = {
        name: low + (high << 32) for name, (low, high) in zip(COUNTERS, state.totals, strict=True)
    }
    assert totals == {name: model.totals[name] for name in COUNTERS}


def draw_batch(rng: np.random.Generator, sizes: Sizes, step: int) -> list[int]:
    """Some ids often, most seldom, others with time; now and then one alone, or none."""
    n = int(rng.choice(BATCHES))
    kind = rng.integers(0, 10)
    if kind == 0:
        ids = np.full(n, rng.integers(0, sizes.ids))
    elif kind == 1:
        ids = rng.integers(0, 10 * sizes.ids, n)
    else:
        ids = (sizes.ids ** rng.random(n)).astype(np.int64) - 1
        ids = (ids * (1 + step // 200 % 7) + step // 50) % sizes.ids
    ids = np.where(rng.random(n) < (1.0 if kind == 2 else 0.1), -1 - ids % 3, ids)
    return ids.tolist()


def drive(
    sizes: Sizes, scoring: Scoring, method: str, operations: int, seed: int, dtype: str = "int32"
) -> Counter[str]:
    """Random operations on both; how often each took place."""
    rng = np.random.default_rng(seed)
    model, subject = Model(sizes, scoring), Subject(sizes, scoring, method, dtype)
    names = ("observe", "populate", "probe", "heat", "reset")
    odds = (0.6, 0.25, 0.146, 0.002, 0.002)
    done: Counter[str] = Counter()
    for step, name in enumerate(rng.choice(names, operations, p=odds)):
        try:
            if name == "observe":
                keys = draw_batch(rng, sizes, step)
                model.observe(keys)
                subject.observe(keys)
            elif name == "populate":
                done["evicted"] += len(left := model.populate())
                assert subject.populate() == left
            elif name == "probe":
                keys = draw_batch(rng, sizes, step)
                assert subject.probe(keys) == model.probe(keys)
            elif name == "heat" and not model.lru:
                below = int(rng.integers(0, 50))
                model.heat(5, below)
                subject.heat(5, below)
            elif name == "reset":
                model.reset()
                subject.reset()
            model.check_promises()
            compare(model, subject.directory)
        except AssertionError as error:
            raise AssertionError(
                f"{sizes}, {scoring}, {method}, seed {seed}: operation {step}, {name}"
            ) from error
        done[str(name)] += 1
    return done
