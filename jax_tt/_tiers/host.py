"""`HostStore`: records by key in host memory, the rest of them on disk."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jax_tt._tiers.disk import DiskStore, StoreError, UnwrittenError
from jax_tt._tiers.key_index import KeyIndex
from jax_tt._tiers.row_bytes import RecordLayout, addresses


class Fetched(NamedTuple):
    """Records of keys.

    Attributes:
        entries: of every array of a record, ``[size, ...]``; unspecified where there is no record.
        in_memory: bool ``[n]``.
        on_disk: bool ``[n]``, and not in memory.
    """

    entries: list[np.ndarray]
    in_memory: np.ndarray
    on_disk: np.ndarray

    @property
    def missing(self) -> np.ndarray:
        """The keys that have no record, bool ``[n]``."""
        return ~(self.in_memory | self.on_disk)


class HostStore:
    """Records of equal layout by 64-bit key.

    The most recent ones are in memory. Without a disk, all of them must find a place there. A call that raises an
    `UnwrittenError` may be repeated: what a disk cannot take stays in memory.

    Args:
        rows: number of records in memory.
        layout: of a record.
        disk: for the other records, or None.
        table: name of the table.

    Attributes:
        to_disk: records written to disk so far.
    """

    def __init__(self, rows: int, layout: RecordLayout, disk: DiskStore | None, table: str):
        self._layout, self._disk, self._table = layout, disk, table
        self._slots = KeyIndex()
        # Of slots. Pages take memory only once they are written, and slots that were in use before come first.
        self._records = np.empty((rows, layout.size), np.uint8)
        self._keys = np.empty(rows, np.uint64)
        self._arrived = np.zeros(
            rows, np.int64
        )  # the number of the call that wrote a record; 0 in empty slots
        self._changed = np.zeros(rows, bool)
        # Slots from this one on were never in use; emptied ones are a stack.
        self._unused, self._emptied, self._depth = 0, np.empty(rows, np.int64), 0
        # Slots by their arrival, the oldest first. Slots that were emptied since then are still named.
        self._order: collections.deque[tuple[int, np.ndarray]] = collections.deque()
        self._named = self._clock = self._last = 0
        self._failed = ""
        self.to_disk = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def rows(self) -> int:
        """The number of records that have a place in memory."""
        return len(self._keys)

    def get(self, keys: np.ndarray, size: int) -> Fetched:
        """The records of keys uint64 ``[n]``, in arrays of ``size`` entries, at least n."""
        self._check()
        slots = self._slots.find(keys)
        in_memory, on_disk = slots >= 0, np.zeros(len(keys), bool)
        entries = self._layout.empty(size)
        here = np.flatnonzero(in_memory)
        self._layout.unpack(addresses(self._records, slots[here]), entries, here)
        if self._disk is not None and len(here) < len(keys):
            rest = np.flatnonzero(~in_memory)

            def take(records: np.ndarray, positions: np.ndarray) -> None:
                self._layout.unpack(records, entries, rest[positions])

            on_disk[rest] = self._disk.get(self._table, keys[rest], take)
        return Fetched(entries, in_memory, on_disk)

    def put(self, keys: np.ndarray, entries: list[np.ndarray], rows: np.ndarray) -> None:
        """Writes records of distinct keys, which are in some rows of arrays; the oldest leave memory for the disk.

        Raises:
            StoreError: the disk cannot be written.
        """
        with self.whole():
            excess = max(0, len(keys) - self.rows)
            if excess:
                self.write(keys[:excess], entries, rows[:excess])
                self.erase(keys[:excess])
            keys, rows, self._last = keys[excess:], rows[excess:], len(keys) - excess
            self._make_room(len(keys))
            slots = self._empty_slots(len(keys))
            before = self._slots.set(keys, slots)
            self._leave(before[before >= 0])
            self._clock += 1
            self._keys[slots], self._arrived[slots], self._changed[slots] = keys, self._clock, True
            self._layout.pack(entries, rows, addresses(self._records, slots))
            self._append(slots)

    def keys(self) -> np.ndarray:
        """The keys of all records, those on disk included; some twice."""
        self._check()
        held = self._keys[self._arrived > 0]
        return held if self._disk is None else np.concatenate([held, self._disk.keys(self._table)])

    def erase(self, keys: np.ndarray) -> None:
        """Removes keys from memory; their records on disk stay."""
        with self.whole():
            slots = self._slots.erase(keys)
            self._leave(slots[slots >= 0])

    def remove(self, keys: np.ndarray) -> None:
        """Removes distinct keys from memory and from the disk."""
        if self._disk is not None:
            self._disk.erase(self._table, keys)
        self.erase(keys)

    def write_ahead(self) -> None:
        """Makes room for as many records as came last, while there is time."""
        if self._disk is not None:
            with self.whole():
                self._make_room(self._last)

    def grow(self, rows: int) -> None:
        """Makes places for this number of records."""
        self._check()
        before = self._records, self._arrived, self._changed, self._emptied, self._keys
        # If there is no memory for one of them, all stay as they are.
        longer = [_lengthened(array, rows - self.rows) for array in before]
        self._records, self._arrived, self._changed, self._emptied, self._keys = longer

    def flush(self) -> None:
        """Writes everything to disk that is not there."""
        self._check()
        slots = np.flatnonzero(self._changed & (self._arrived > 0))
        self._write_slots(slots)
        self._changed[slots] = False

    def write(self, keys: np.ndarray, entries: list[np.ndarray], rows: np.ndarray) -> None:
        """Writes records to disk, if there is one, and not to memory."""
        if self._disk is not None and len(keys):
            records = np.empty((len(keys), self._layout.size), np.uint8)
            to = addresses(records, np.arange(len(keys)))
            self._layout.pack(entries, rows, to)
            self._to_disk(keys, to)

    def _check(self) -> None:
        """Raises if a change was not completed."""
        if self._failed:
            raise StoreError(self._failed)

    @contextlib.contextmanager
    def whole(self, *, repeats: bool = True) -> Iterator[None]:
        """After an interrupt in here a key may lack its record, so that nothing may be read any more.

        So it is after a full disk unless the caller ``repeats`` what it did.
        """
        self._check()
        try:
            yield
        except BaseException as error:
            if repeats and isinstance(error, UnwrittenError):
                raise
            if isinstance(error, StoreError):
                self._failed = str(error)
            else:
                name = f"tiers[{self._table!r}]"
                self._failed = (
                    f"{name}: a change in host memory ended with {error!r}. Open them again."
                )
            raise

    def _write_slots(self, slots: np.ndarray) -> None:
        if self._disk is not None and len(slots):
            self._to_disk(self._keys[slots], addresses(self._records, slots))

    def _to_disk(self, keys: np.ndarray, records: np.ndarray) -> None:
        assert self._disk is not None
        self._disk.put(self._table, keys, records)
        self.to_disk += len(keys)

    def _make_room(self, count: int) -> None:
        lacking = count - (self.rows - len(self))
        if lacking <= 0:
            return
        if self._disk is None:
            raise StoreError(full(self._table, self.rows))
        oldest = self._oldest(lacking)
        slots = np.concatenate([some for _, some in oldest])
        try:
            self._write_slots(slots[self._changed[slots]])
        except UnwrittenError:
            self._order.extendleft(reversed(oldest))
            self._named += len(slots)
            raise
        self._slots.erase(self._keys[slots])
        self._leave(slots)

    def _oldest(self, count: int) -> list[tuple[int, np.ndarray]]:
        """The slots of the oldest records, which are no longer named in the order, as they were named there."""
        parts = []
        while count:
            clock, slots = self._order.popleft()
            self._named -= len(slots)
            slots = slots[self._arrived[slots] == clock]
            if len(slots) > count:
                self._order.appendleft((clock, slots[count:]))
                self._named += len(slots) - count
            parts.append((clock, slots[:count]))
            count -= len(parts[-1][1])
        return parts

    def _append(self, slots: np.ndarray) -> None:
        self._order.append((self._clock, slots))
        self._named += len(slots)
        if self._named > 2 * self.rows:
            kept = [(clock, some[self._arrived[some] == clock]) for clock, some in self._order]
            self._order = collections.deque(pair for pair in kept if len(pair[1]))
            self._named = len(self)

    def _leave(self, slots: np.ndarray) -> None:
        """Slots whose keys are no longer theirs can be used again."""
        self._arrived[slots] = 0
        self._emptied[self._depth : self._depth + len(slots)] = slots
        self._depth += len(slots)

    def _empty_slots(self, count: int) -> np.ndarray:
        used = min(count, self._depth)
        self._depth -= used
        unused = np.arange(self._unused, self._unused + count - used)
        self._unused += len(unused)
        return np.concatenate([self._emptied[self._depth : self._depth + used], unused])


def full(table: str, rows: int) -> str:
    """The message where there is no room in memory, and no disk."""
    return (
        f"tiers[{table!r}].host_rows: {rows} rows in host memory are full; make room by grow_host({table!r}, rows), or "
        "give a path for a tier on disk."
    )


def _lengthened(array: np.ndarray, more: int) -> np.ndarray:
    """The array with so many more entries, all 0."""
    longer = np.zeros((len(array) + more, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
