"""`RecordLog`: records by key in blocks that are written once, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from jax_tt._tiers.key_index import KeyIndex
from jax_tt._tiers.map_reader import MapReader
from jax_tt._tiers.row_bytes import addresses, checksum, checksums, copy_rows

# Bytes of a block, at least one record.
BLOCK_BYTES = 1 << 20
# Memory of blocks that is kept for others.
_MOST_SPARE = 16
# Bytes of records that are read together, which stay in the cache until they are used.
_READ_BYTES = 1 << 18
# Blocks that are less than half full, which frequent saves leave; so many of them are moved together.
_SMALL_TOGETHER = 16


class DamagedBlockError(Exception):
    """The bytes of a block differ from what was written."""


class RecordLog:
    """Where the records of a table are: of a key, the one that was appended last.

    A block is memory uint8 ``[bytes]``: the number of its records, their keys and the records, each with its checksum
    behind it. A record is compared with its checksum whenever it is read, and so is the head of a stored block, all
    that comes before its records. Blocks have ascending numbers. The last one is open: records are appended until it is
    full. If few records of a block are still current, these are appended once more, and the block is dropped; in the
    same way, blocks that ended before they were full are moved together.

    Args:
        size: bytes of a record.
        least: bytes of a block at least.
        reader: reads stored blocks, which may be maps of a file.
        block_bytes: of a full block, about.

    Attributes:
        rows: records of a full block.
    """

    def __init__(self, size: int, least: int, reader: MapReader, block_bytes: int = BLOCK_BYTES):
        # With its checksum, a record takes this much more.
        self._size, self._stride, self._least, self._reader = size, size + 8, least, reader
        self.rows = max(1, (block_bytes - 8) // (self._stride + 8))
        self._index = KeyIndex()
        # By number of the block: its memory, where its records begin, how many there are, and how many are current.
        self._blocks: list[np.ndarray | None] = []
        self._firsts, self._counts = np.zeros(16, np.uint64), np.zeros(16, np.int64)
        self._live = np.zeros(16, np.int64)
        # Checksums of the heads of stored blocks.
        self._heads: dict[int, int] = {}
        # Records in blocks that are not dropped.
        self._total = 0
        # Of the open block, and memory for others.
        self._open = False
        self._spare: list[np.ndarray] = []
        # In ascending order, erased keys that may have records in blocks.
        self._gone = np.zeros(0, np.uint64)
        self._dropped: list[int] = []

    def __len__(self) -> int:
        return len(self._index)

    @property
    def end(self) -> int:
        """The number of the next block."""
        return len(self._blocks)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Where the records of keys uint64 ``[n]`` are, int64 ``[n]``, -1 where there is none.

        The places are valid until the next call of another method.
        """
        return self._index.find(keys)

    def read(self, places: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Records in some of the places that `find` returns: parts of the places, and the addresses of their records.

        Raises:
            DamagedBlockError: a record does not have its checksum.
            UnreadableError: a record cannot be read.
        """
        # Copied first, so that the bytes that are compared are the bytes that are used.
        for part, records in self._copies(places):
            expected = records[:, self._size :].view(np.uint64)[:, 0]
            wrong = np.flatnonzero(checksums(records[:, : self._size]) != expected)
            if len(wrong):
                number, row = divmod(int(places[part][wrong[0]]), self.rows)
                raise DamagedBlockError(f"record {row} of block {number} has another checksum")
            yield part, addresses(records, np.arange(len(records)))

    def keys(self) -> np.ndarray:
        """The keys of all records, uint64 in ascending order."""
        keys = self._keys_in_blocks()
        return keys[self._index.find(keys) >= 0]

    def append(self, keys: np.ndarray, records: np.ndarray) -> list[int]:
        """Appends records of distinct keys, given by their addresses; returns which blocks became full."""
        return [*self._append(keys, records, checked=False), *self._without_excess()]

    def erase(self, keys: np.ndarray) -> list[int]:
        """Removes the records of distinct keys; returns which blocks became full."""
        places = self._index.erase(keys)
        there = places >= 0
        np.subtract.at(self._live, places[there] // self.rows, 1)
        self._gone = np.union1d(self._gone, keys[there])
        return self._without_excess()

    def gone(self) -> np.ndarray:
        """Erased keys uint64 that `restore` would find in blocks, no more than there are records in these."""
        self._gone = self._gone[self._index.find(self._gone) < 0]
        if len(self._gone) > self._total - len(self):
            self._gone = np.intersect1d(self._gone, self._keys_in_blocks())
        return self._gone

    def seal(self) -> list[int]:
        """Ends the open block; returns which blocks ended."""
        full = self._join_small()
        if not self._open:
            return full
        number = self.end - 1
        block, count = self._memory(number), int(self._counts[number])
        head, used = 8 + 8 * self.rows, 8 + (8 + self._stride) * count
        sealed = np.zeros(max(used, self._least), np.uint8)
        sealed[: 8 + 8 * count] = block[: 8 + 8 * count]
        sealed[8 + 8 * count : used] = block[head : head + count * self._stride]
        self.settle(number, sealed)
        self._open = False
        return [*full, number]

    def block(self, number: int) -> np.ndarray:
        """The memory of a block that is no longer open, as it is to be stored."""
        block, count = self._memory(number), int(self._counts[number])
        block[:8].view(np.int64)[0] = count
        self._heads[number] = checksum(block[: 8 + 8 * count])
        return block

    def head(self, number: int) -> int:
        """The checksum of the head of a stored block."""
        return self._heads[number]

    @property
    def dropped(self) -> list[int]:
        """Numbers of the blocks that are no longer needed."""
        return list(self._dropped)

    def skip_to(self, end: int) -> None:
        """Numbers later blocks from ``end`` on."""
        while self.end < end:
            self._new_block(None)

    def take_dropped(self, among: Callable[[int], bool]) -> list[int]:
        """Numbers of some blocks that are no longer needed; their memory is not used after this call."""
        numbers = [number for number in self._dropped if among(number)]
        self._dropped = [number for number in self._dropped if not among(number)]
        for number in numbers:
            self._blocks[number] = None
            self._heads.pop(number, None)
        return numbers

    def settle(self, number: int, memory: np.ndarray) -> None:
        """Uses other memory for a block, which contains the same."""
        before, self._blocks[number] = self._blocks[number], memory
        self._firsts[number] = addresses(memory, np.array([8 + 8 * self._counts[number]]))[0]
        if before is None or len(before) != self._full_bytes or not before.flags.owndata:
            return
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(before)

    def restore(self, number: int, memory: np.ndarray, head: int) -> None:
        """Adds a stored block with the checksum ``head``; blocks come in ascending order of numbers.

        Raises:
            DamagedBlockError: this is not the block.
        """
        count = -1
        if len(memory) >= 8:
            count = int(self._head(memory, 0)[:8].view(np.int64)[0])
        fits = 0 <= count <= self.rows and len(memory) >= 8 + (8 + self._stride) * count
        if not fits or checksum(self._head(memory, count)) != head:
            raise DamagedBlockError(
                f"block {number} has {len(memory)} bytes with {count} records, or other keys"
            )
        self.skip_to(number)
        self._new_block(memory)
        self._counts[number], self._heads[number] = count, head
        self.settle(number, memory)
        # Of a key that is in the block more than once, the last record counts.
        keys, last = np.unique(self._keys_of(number)[::-1], return_index=True)
        self._enter(number, count - 1 - last, keys)
        self._total += count

    def _append(self, keys: np.ndarray, records: np.ndarray, *, checked: bool) -> list[int]:
        """Appends records, which have their checksums behind them if they are ``checked``."""
        full, done = [], 0
        while done < len(keys):
            if not self._open:
                self._new_block(
                    self._spare.pop() if self._spare else np.empty(self._full_bytes, np.uint8)
                )
                self._open = True
            number = self.end - 1
            block, first = self._memory(number), int(self._counts[number])
            rows = np.arange(first, min(self.rows, first + len(keys) - done))
            part = slice(done, done + len(rows))
            block[8 : 8 + 8 * self.rows].view(np.uint64)[rows] = keys[part]
            targets = self._firsts[number] + (rows * self._stride).astype(np.uint64)
            copy_rows(records[part], targets, self._stride if checked else self._size)
            if not checked:
                head = 8 + 8 * self.rows
                written = block[head : head + self.rows * self._stride].reshape(self.rows, -1)
                written = written[first : first + len(rows)]
                written[:, self._size :].view(np.uint64)[:, 0] = checksums(written[:, : self._size])
            self._counts[number] += len(rows)
            self._enter(number, rows, keys[part])
            self._total += len(rows)
            done += len(rows)
            if self._counts[number] == self.rows:
                full.append(number)
                self._open = False
        return full

    def _without_excess(self) -> list[int]:
        """Moves records until half of those in blocks are current; returns which blocks became full."""
        full = []
        while self._total > 2 * len(self) + 2 * self.rows:
            full += self._shrink()
        return full

    def _keys_in_blocks(self) -> np.ndarray:
        parts = [self._keys_of(number) for number in range(self.end) if self._counts[number]]
        return np.unique(np.concatenate([*parts, np.zeros(0, np.uint64)]))

    def _enter(self, number: int, rows: np.ndarray, keys: np.ndarray) -> None:
        """Notes that these distinct keys have these records of a block."""
        before = self._index.set(keys, rows + number * self.rows)
        np.subtract.at(self._live, before[before >= 0] // self.rows, 1)
        self._live[number] += len(keys)

    def _shrink(self) -> list[int]:
        """Moves the current records of the block with the smallest share of them."""
        counts = self._counts[: self.end - self._open]
        share = self._live[: len(counts)] / np.maximum(counts, 1)
        return self._move(int(np.argmin(np.where(counts > 0, share, np.inf))))

    def _join_small(self) -> list[int]:
        """Moves the small blocks, if there are many; so each save moves a fraction of a full block at most."""
        counts = self._counts[: self.end - self._open]
        small = np.flatnonzero((counts > 0) & (counts <= self.rows // 2))
        if len(small) < _SMALL_TOGETHER:
            return []
        return [number for block in small.tolist() for number in self._move(block)]

    def _move(self, number: int) -> list[int]:
        """Drops a block, and appends its records that are still current."""
        keys = self._keys_of(number)
        places = np.arange(len(keys)) + number * self.rows
        kept = np.flatnonzero(self._index.find(keys) == places)
        full = []
        for part, records in self._copies(places[kept]):
            # With the checksums that were written, so that damage is still noticed.
            sources = addresses(records, np.arange(len(records)))
            full += self._append(keys[kept[part]], sources, checked=True)
        self._total -= len(keys)
        self._counts[number] = 0
        self._dropped.append(number)
        return full

    def _new_block(self, memory: np.ndarray | None) -> None:
        number = self.end
        if number == len(self._firsts):
            more = np.zeros(number, np.int64)
            self._firsts = np.concatenate([self._firsts, more.view(np.uint64)])
            self._counts, self._live = (
                np.concatenate([x, more]) for x in (self._counts, self._live)
            )
        self._blocks.append(memory)
        if memory is not None:
            self._firsts[number] = addresses(memory, np.array([8 + 8 * self.rows]))[0]

    @property
    def _full_bytes(self) -> int:
        return max(8 + (8 + self._stride) * self.rows, self._least)

    def _memory(self, number: int) -> np.ndarray:
        memory = self._blocks[number]
        assert memory is not None
        return memory

    def _keys_of(self, number: int) -> np.ndarray:
        head = self._head(self._memory(number), int(self._counts[number]))
        if number in self._heads and checksum(head) != self._heads[number]:
            raise DamagedBlockError(f"the keys of block {number} do not have their checksum")
        return head[8:].view(np.uint64).copy()

    def _head(self, block: np.ndarray, count: int) -> np.ndarray:
        """The head of a block of so many records, until the next call of the reader."""
        return self._reader.rows(addresses(block, np.zeros(1, np.int64)), 8 + 8 * count)[0]

    def _copies(self, places: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Records with their checksums: parts of the places, and uint8 ``[n, bytes]`` until the next part."""
        step = max(64, _READ_BYTES // self._stride)
        for first in range(0, len(places), step):
            part = slice(first, first + step)
            blocks, rows = np.divmod(places[part], self.rows)
            sources = self._firsts[blocks] + (rows * self._stride).astype(np.uint64)
            yield part, self._reader.rows(sources, self._stride)
