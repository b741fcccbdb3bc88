"""`DevicePlaces`: which rows of a table are on the device, decided on the host before the device gets there."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base import ffi
from jax_tt._directories.batch_clock import KEPT, LAST, WHOLE, numbers_of_batches, set_back
from jax_tt._directories.hash_directory import (
    COUNTERS,
    Eviction,
    Insertion,
    KeyDirectory,
    directory_of,
    init_directory,
    named_directory,
)
from jax_tt._directories.placing import words_of_keys
from jax_tt._native import hash_backend
from jax_tt._tiers.key_index import KeyIndex

# One of so many rows belongs to the overflow.
_SHARE = 64
# Slots, keys that come, keys that leave, and whether a key leaves.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Exchanged(NamedTuple):
    """Rows that change places for one batch.

    Attributes:
        slots: int32 ``[m]``, ascending.
        loaded: uint64 ``[m]``, the keys that come.
        evicted: uint64 ``[m]``, the keys that leave.
        full: bool ``[m]``, whether a key leaves.
        kept: bool ``[m]``, whether the key that comes stays for later batches.
        requested: int32, the slots of all ids of the batch.
        counts: `COUNTERS` of the batch.
    """

    slots: np.ndarray
    loaded: np.ndarray
    evicted: np.ndarray
    full: np.ndarray
    kept: np.ndarray
    requested: np.ndarray
    counts: dict[str, int]


class DevicePlaces:
    """The keys of the rows on the device.

    Their places follow from the keys of the batches alone, so that they are known for batches that the device has not
    reached yet.

    Args:
        rows: of the table on the device, a multiple of ``ways``.
        ways: rows in a set.
        policy: which rows leave: ``"lru"`` or ``"lfu"``.
        label: for error messages.
    """

    def __init__(self, rows: int, ways: int, policy: str, label: str):
        # One set has no need of an overflow: any key may take any of its rows.
        spare = max(rows // _SHARE // ways, min(1, rows // ways - 1)) * ways
        self._directory = _empty((rows - spare) // ways, ways)
        self._overflow = Overflow(spare)
        self._policy, self._label, self._rows = policy, label, rows
        self._clock = 0

    def place(
        self, keys: np.ndarray, present: np.ndarray, refused: np.ndarray
    ) -> tuple[np.ndarray, Exchanged]:
        """The slots of the keys of a batch, int32 ``[n]`` and 0 where none is present, and the rows that it exchanges.

        Keys in ``refused`` have their slots for this batch alone.

        Raises:
            ValueError: the distinct keys do not fit on the device.
        """
        self._count()
        given = keys[present]
        positions = np.full(len(given), -1, np.int32)
        if len(self._overflow):
            positions = self._spare(given)
        elsewhere = int(np.count_nonzero(positions >= 0))
        counts, parts = self._insert(given, positions, self._policy)
        if counts["refused"] and self._policy == "lfu":
            # All keys of their sets were requested more often; the least frequent ones leave all the same.
            forced, more = self._insert(given, positions, "custom")
            counts["refused"] = forced["refused"]
            parts = [*parts, *more]
        if counts["refused"]:
            parts.append(self._overflowing(given[positions < 0], counts))
            positions = np.where(positions < 0, self._spare(given), positions)
        merged = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        order = np.argsort(merged[0])
        new, loaded, evicted, full = (array[order] for array in merged)
        counts |= {"inserted": len(new), "evicted": int(full.sum())}
        counts["requests"] += elsewhere
        counts["hits"] += elsewhere
        slots = np.zeros(len(keys), np.int32)
        slots[present] = positions
        kept = ~np.isin(loaded, refused)
        self.empty(new[~kept])
        return slots, Exchanged(new, loaded, evicted, full, kept, positions, counts)

    def _count(self) -> None:
        """Counts a batch, from an earlier one on where the numbers of batches come to their end."""
        if self._clock >= LAST:
            state = named_directory(self._directory)
            words = numbers_of_batches(state, self._policy)
            arrays = [*(state[name] for name in words), self._overflow.touched]
            after = set_back(np.int32(self._clock), arrays, (*words.values(), WHOLE))
            *arrays, self._overflow.touched = map(np.array, after)
            self._directory = directory_of({**state, **dict(zip(words, arrays, strict=True))})
            self._clock = KEPT
        self._clock += 1

    def empty(self, slots: np.ndarray) -> None:
        """Takes the keys out of these slots."""
        here, ways = slots < self._directory.capacity, self._directory.ways
        sets, way = np.divmod(slots[here], ways)
        self._directory.keys[sets, :, way] = 0
        self._directory.scores[sets, :, way] = 0
        self._directory.touched[sets, way] = 0
        self._overflow.empty(slots[~here] - self._directory.capacity)

    def _insert(
        self, keys: np.ndarray, positions: np.ndarray, policy: str
    ) -> tuple[dict[str, int], list[_Parts]]:
        """Finds or inserts the keys whose slot in ``positions`` is -1, and writes their slots there."""
        words, wanted = padded(keys, 1)
        wanted[: len(keys)] = positions < 0
        done = self._inserted(words, wanted, policy)
        counts = dict(zip(COUNTERS, done.counts.tolist(), strict=True))
        np.copyto(positions, done.found[: len(keys)], where=positions < 0)
        new, loaded, evicted, touched = (
            array[: counts["inserted"]]
            for array in (done.slots, done.keys, done.old_keys, done.old_touched)
        )
        if policy == "custom":
            ways = self._directory.ways
            self._directory.scores[new // ways, :, new % ways] = 0, 1
        return counts, [(new, to_integers(loaded), to_integers(evicted), touched > 0)]

    def _inserted(self, words: np.ndarray, wanted: np.ndarray, policy: str) -> Insertion:
        """Inserts keys into the directory, in this thread where there is a native module."""
        # Scores that are not below any other; only "custom" looks at them.
        scores = np.full(words.shape if policy == "custom" else (0, 2), 2**32 - 1, np.uint32)
        native = ffi.load("cpu")
        if native is None:
            after, done = _insert(self._directory, words, wanted, scores, self._clock, policy)
            self._directory = KeyDirectory(*map(np.array, after))
            return Insertion(*map(np.asarray, done))
        size = len(words)
        slots, touched, positions = (np.empty(size, np.int32) for _ in range(3))
        done = Insertion(
            slots=slots,
            keys=np.empty((size, 2), np.uint32),
            old_keys=np.empty((size, 2), np.uint32),
            old_scores=np.empty((0, 2), np.uint32),
            old_touched=touched,
            counts=np.empty(len(COUNTERS), np.int32),
            found=positions,
        )
        native.hash_insert_here(
            *self._directory,
            words,
            wanted,
            scores,
            self._clock,
            policy,
            done.slots,
            done.keys,
            done.old_keys,
            done.old_touched,
            done.counts,
            done.found,
        )
        return done

    def _spare(self, keys: np.ndarray) -> np.ndarray:
        """The slots of keys in the overflow, -1 for other keys."""
        places = self._overflow.touch(keys, self._clock)
        return np.where(places < 0, -1, places + self._directory.capacity).astype(np.int32)

    def _overflowing(self, keys: np.ndarray, counts: dict[str, int]) -> _Parts:
        loaded = np.unique(keys)
        inserted = self._overflow.insert(loaded, self._clock)
        if inserted is None:
            raise ValueError(
                f"{self._label}: {counts['unique']} distinct ids of a batch do not fit into the {self._rows} rows on "
                f"the device ({counts['refused']} found no place in their sets, and the overflow has "
                f"{self._overflow.rows} rows); expected about twice as many rows as distinct ids."
            )
        places, evicted, full = inserted
        return (places + self._directory.capacity).astype(np.int32), loaded, evicted, full

    def reset(self, keys: np.ndarray, full: np.ndarray) -> None:
        """Puts these keys uint64 ``[rows]`` in the slots that are full. All become equally old."""
        (keys, rest), (full, rest_full) = (
            np.split(array, [self._directory.capacity]) for array in (keys, full)
        )
        self._overflow.reset(rest, rest_full)
        sets, _, ways = self._directory.keys.shape
        touched = full.astype(np.int32)
        words = words_of_keys(np.where(full, keys, np.uint64(0))).reshape(sets, ways, 2)
        scores = np.stack([np.zeros_like(touched), touched]).reshape(2, sets, ways)
        self._directory = KeyDirectory(
            np.ascontiguousarray(words.transpose(0, 2, 1)),
            np.ascontiguousarray(scores.transpose(1, 0, 2).astype(np.uint32)),
            touched.reshape(sets, ways),
        )


def _empty(sets: int, ways: int) -> KeyDirectory:
    """An empty directory of numpy arrays."""
    shapes = jax.eval_shape(partial(init_directory, sets, ways))
    return KeyDirectory(*(np.zeros(like.shape, like.dtype) for like in shapes))


@partial(jax.jit, static_argnums=5)
def _insert(
    directory: KeyDirectory,
    words: jax.Array,
    present: jax.Array,
    scores: jax.Array,
    now: jax.Array,
    policy: str,
) -> tuple[KeyDirectory, Insertion]:
    if policy != "custom":
        scores = jnp.zeros_like(words)
    rest = scores, jnp.asarray(now, jnp.int32), jnp.zeros((), jnp.uint32)
    return hash_backend.insert(directory, words, present, *rest, Eviction(policy), "reference")


class Overflow:
    """Places that any key may take, from 0 to ``rows`` - 1; a new key takes the place that was used least recently.

    Args:
        rows: the number of places.

    Attributes:
        touched: int32 ``[rows]``, the number of the last batch that requested the key of a place; 0 without a key.
    """

    def __init__(self, rows: int):
        self._places = KeyIndex()
        self._keys, self.touched = np.zeros(rows, np.uint64), np.zeros(rows, np.int32)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rows(self) -> int:
        """The number of places."""
        return len(self._keys)

    def touch(self, keys: np.ndarray, now: int) -> np.ndarray:
        """The places int64 ``[n]`` of keys uint64 ``[n]`` that batch ``now`` requests, -1 for missing keys."""
        places = self._places.find(keys)
        self.touched[places[places >= 0]] = now
        return places

    def insert(
        self, keys: np.ndarray, now: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The places of distinct new keys in ascending order, the keys that were there, and which of them are keys.

        None where batch ``now`` requests too many of the others.
        """
        places = np.sort(np.argsort(self.touched, kind="stable")[: len(keys)])
        if len(places) < len(keys) or (self.touched[places] == now).any():
            return None
        old, full = self._keys[places], self.touched[places] > 0
        self._places.erase(old[full])
        self._places.set(keys, places)
        self._keys[places], self.touched[places] = keys, now
        return places, old, full

    def empty(self, places: np.ndarray) -> None:
        """Takes the keys out of these places."""
        self._places.erase(self._keys[places])
        self.touched[places] = 0

    def reset(self, keys: np.ndarray, full: np.ndarray) -> None:
        """Puts these keys uint64 ``[rows]`` in the places that are full."""
        self._places = KeyIndex()
        self._places.set(keys[full], np.flatnonzero(full))
        self._keys, self.touched = keys.copy(), full.astype(np.int32)


def to_integers(words: np.ndarray) -> np.ndarray:
    """The inverse of `words_of_keys`."""
    return words[..., 0].astype(np.uint64) << np.uint64(32) | words[..., 1]


def rounded_up(count: int, fewest: int = 1) -> int:
    """A size of at least ``count`` and ``fewest``, at most an eighth larger, so that few programs are compiled."""
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return max(fewest, -(-count // unit) * unit)


def padded(keys: np.ndarray, fewest: int) -> tuple[np.ndarray, np.ndarray]:
    """Words of keys with zeros up to `rounded_up` of their number, and which of them are present."""
    size = rounded_up(len(keys), fewest)
    words = np.pad(words_of_keys(keys), ((0, size - len(keys)), (0, 0)))
    return words, np.arange(size) < len(keys)
