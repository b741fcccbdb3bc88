"""`HostStore`: records by key in host memory, the rest of them on disk."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._hash import backend
from jax_tt._hash.directory import Eviction, Insertion, KeyDirectory, init_directory
from jax_tt._hash.reference import erase
from jax_tt._tiers.disk import DiskStore, StoreError
from jax_tt._tiers.words import on_host, padded, to_integers, to_words

# The smallest number of keys in a call, so that few programs are compiled.
_FEWEST = 64


@dataclasses.dataclass
class Traffic:
    """What a store has read and written, in records."""

    host_hits: int = 0
    disk_hits: int = 0
    to_host: int = 0
    to_disk: int = 0


class Found(NamedTuple):
    """Records of keys.

    Attributes:
        records: uint8 ``[n, record]``, zeros where there is none.
        in_memory: bool ``[n]``.
        on_disk: bool ``[n]``, of those that are not in memory.
    """

    records: np.ndarray
    in_memory: np.ndarray
    on_disk: np.ndarray

    @property
    def missing(self) -> np.ndarray:
        """The keys that have no record, bool ``[n]``."""
        return ~(self.in_memory | self.on_disk)


class HostStore:
    """Records of equal size by 64-bit key.

    The most recent ones are in memory. Without a disk, all of them must find a place there.

    Args:
        rows: number of records in memory, a multiple of ``ways``.
        record: bytes of a record.
        ways: records in a set of the directory.
        disk: for the other records, or None.
        table: name of the table.
    """

    def __init__(self, rows: int, record: int, ways: int, disk: DiskStore | None, table: str):
        self._disk, self._table = disk, table
        self._directory = on_host(lambda: init_directory(rows // ways, ways))
        # Memory is used only by pages that are written.
        self._records = np.zeros((rows, record), np.uint8)
        self._changed = np.zeros(rows, bool)
        self._clock = 0
        self.traffic = Traffic()

    def get(self, keys: np.ndarray, counting: bool = True) -> Found:
        """The records of keys uint64 ``[n]``."""
        slots = self._slots(keys)
        in_memory, on_disk = slots >= 0, np.zeros(len(keys), bool)
        records = np.zeros((len(keys), self._records.shape[1]), np.uint8)
        records[in_memory] = self._records[slots[in_memory]]
        if self._disk is not None and not in_memory.all():
            rest = np.flatnonzero(~in_memory)
            there, of_disk = self._disk.get(self._table, keys[rest])
            records[rest[there]], on_disk[rest[there]] = of_disk, True
        if counting:
            self.traffic.host_hits += int(in_memory.sum())
            self.traffic.disk_hits += int(on_disk.sum())
        return Found(records, in_memory, on_disk)

    def put(self, keys: np.ndarray, records: np.ndarray) -> None:
        """Writes records of distinct keys; the oldest ones leave memory for the disk.

        Raises:
            StoreError: there is no disk, and the records do not fit into memory. Nothing is lost before.
        """
        if not len(keys):
            return
        self._clock += 1
        words, present = padded(to_words(keys), _FEWEST)
        policy = "none" if self._disk is None else "lru"
        self._directory, done = _insert(self._directory, words, present, self._clock, policy)
        done = jax.device_get(done)
        there = done.old_touched > 0
        left = done.slots[there]
        changed = self._changed[left]
        self.write(to_integers(done.old_keys[there][changed]), self._records[left[changed]])
        slots = self._slots(keys)
        placed = slots >= 0
        if self._disk is None and not placed.all():
            raise StoreError(
                f"tiers[{self._table!r}].host_rows: {len(self._records)} rows in host memory are full; raise "
                "host_rows, or give a path for a tier on disk."
            )
        self._records[slots[placed]] = records[placed]
        self._changed[slots[placed]] = True
        self.traffic.to_host += int(placed.sum())
        self.write(keys[~placed], records[~placed])

    def erase(self, keys: np.ndarray) -> None:
        """Removes keys from memory; what the disk has of them stays."""
        if not len(keys):
            return
        words, present = padded(to_words(keys), _FEWEST)
        self._directory = _erase(self._directory, words, present)

    def flush(self) -> None:
        """Writes everything to disk that is not there."""
        touched = np.asarray(self._directory.touched).reshape(-1)
        slots = np.flatnonzero(self._changed & (touched > 0))
        keys = np.asarray(self._directory.keys).transpose(0, 2, 1).reshape(-1, 2)[slots]
        self.write(to_integers(keys), self._records[slots])
        self._changed[:] = False

    def write(self, keys: np.ndarray, records: np.ndarray) -> None:
        """Writes records to disk, if there is one, and not to memory."""
        if self._disk is not None and len(keys):
            self._disk.put(self._table, keys, records)
            self.traffic.to_disk += len(keys)

    def _slots(self, keys: np.ndarray) -> np.ndarray:
        words, present = padded(to_words(keys), _FEWEST)
        return np.asarray(_find(self._directory, words, present))[: len(keys)]


@jax.jit
def _find(directory: KeyDirectory, words: jax.Array, present: jax.Array) -> jax.Array:
    return backend.find(directory, words, present, "auto")


@partial(jax.jit, donate_argnums=0, static_argnums=4)
def _insert(
    directory: KeyDirectory, words: jax.Array, present: jax.Array, now: jax.Array, policy: str
) -> tuple[KeyDirectory, Insertion]:
    rest = jnp.zeros_like(words), jnp.asarray(now, jnp.int32), jnp.zeros((), jnp.uint32)
    return backend.insert(directory, words, present, *rest, Eviction(policy), "auto")


@partial(jax.jit, donate_argnums=0)
def _erase(directory: KeyDirectory, words: jax.Array, present: jax.Array) -> KeyDirectory:
    return erase(directory, backend.find(directory, words, present, "auto"))
