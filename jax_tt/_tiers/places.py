"""`DevicePlaces`: which rows of a table are on the device, decided on the host before the device gets there."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._hash import backend
from jax_tt._hash.directory import COUNTERS, Eviction, Insertion, KeyDirectory, init_directory
from jax_tt._tiers.words import on_host, padded, to_integers, to_words


class Exchanged(NamedTuple):
    """Rows that change places for one batch.

    Attributes:
        slots: int32 ``[m]``, ascending.
        loaded: uint64 ``[m]``, the keys that come.
        evicted: uint64 ``[m]``, the keys that leave.
        full: bool ``[m]``, whether a key leaves.
        requested: int32, the slots of all ids of the batch.
        counts: `COUNTERS` of the batch.
    """

    slots: np.ndarray
    loaded: np.ndarray
    evicted: np.ndarray
    full: np.ndarray
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
        self._directory = on_host(lambda: init_directory(rows // ways, ways))
        self._policy, self._label, self._rows = policy, label, rows
        self._clock = 0

    def place(self, keys: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, Exchanged]:
        """The slots of the keys of a batch, int32 ``[n]`` and 0 where none is present, and the rows that it exchanges.

        Raises:
            ValueError: the distinct keys do not fit on the device.
        """
        self._clock += 1
        words, inside = padded(keys, 1)
        inside[: len(keys)] = present
        self._directory, slots, done = _place(
            self._directory, words, inside, self._clock, self._policy
        )
        counts = dict(zip(COUNTERS, np.asarray(done.counts).tolist(), strict=True))
        if counts["refused"]:
            raise ValueError(
                f"{self._label}: {counts['unique']} distinct ids of a batch do not fit into the {self._rows} rows on "
                f"the device ({counts['refused']} found no place in their sets); expected about twice as many rows as "
                "distinct ids."
            )
        slots = np.asarray(slots)[: len(keys)]
        new, loaded, evicted, touched = (
            np.asarray(array)[: counts["inserted"]]
            for array in (done.slots, done.keys, done.old_keys, done.old_touched)
        )
        return np.where(present, slots, 0), Exchanged(
            new, to_integers(loaded), to_integers(evicted), touched > 0, slots[present], counts
        )

    def reset(self, keys: np.ndarray, full: np.ndarray) -> None:
        """Puts these keys uint64 ``[rows]`` in the slots that are full. All become equally old."""
        sets, _, ways = self._directory.keys.shape
        touched = full.astype(np.int32)
        words = to_words(np.where(full, keys, np.uint64(0))).reshape(sets, ways, 2)
        scores = np.stack([np.zeros_like(touched), touched]).reshape(2, sets, ways)
        arrays = words.transpose(0, 2, 1), scores.transpose(1, 0, 2).astype(np.uint32)
        directory = KeyDirectory(*arrays, touched.reshape(sets, ways))
        self._directory = on_host(lambda: directory)


@partial(jax.jit, donate_argnums=0, static_argnums=4)
def _place(
    directory: KeyDirectory, words: jax.Array, present: jax.Array, now: jax.Array, policy: str
) -> tuple[KeyDirectory, jax.Array, Insertion]:
    rest = jnp.zeros_like(words), jnp.asarray(now, jnp.int32), jnp.zeros((), jnp.uint32)
    directory, done = backend.insert(directory, words, present, *rest, Eviction(policy), "auto")
    return directory, done.found, done
