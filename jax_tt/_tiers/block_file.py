"""`BlockFile`: blocks of bytes in one file, which are read where the system maps it."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Extent(NamedTuple):
    """A part of the file: where it begins, and its bytes."""

    offset: int
    length: int


class BlockFile:
    """A file in which blocks are written where there is room, and whose memory shows them afterwards.

    Args:
        path: of the file, which is created if it does not exist.
        used: the parts that are kept; all others are free.

    Raises:
        OSError: the file cannot be opened.
    """

    # Extents are multiples of it.
    UNIT = mmap.PAGESIZE

    def __init__(self, path: Path, used: Iterable[Extent]):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._map = np.zeros(0, np.uint8)
        # In ascending order, none beside another; the last one has no end.
        self._free: list[Extent] = []
        end = 0
        for extent in sorted(used):
            if extent.offset > end:
                self._free.append(Extent(end, extent.offset - end))
            end = extent.offset + _rounded(extent.length)
        self._end = end
        # A process that was killed may have left more at the end, spare room for the map included.
        self._size = min(os.fstat(self._file).st_size, end)
        os.ftruncate(self._file, self._size)

    def write(self, block: np.ndarray) -> tuple[Extent, np.ndarray]:
        """Writes a block uint8 ``[bytes]`` to free room; returns where, and its memory.

        Raises:
            OSError: it cannot be written, and the room is still free.
        """
        extent = Extent(self._taken(_rounded(len(block))), len(block))
        try:
            view, offset = block.data, extent.offset
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count
            self._size = max(self._size, offset)
            return extent, self.memory(extent)
        except OSError:
            self.free(extent)
            raise

    def is_at(self, path: Path) -> bool:
        """Whether the file is still there, and not another one.

        Raises:
            OSError: there is none.
        """
        return os.path.samestat(os.fstat(self._file), path.stat())

    def free(self, extent: Extent) -> None:
        """Makes the room of a block free, which nobody reads any more."""
        offset, length = extent.offset, _rounded(extent.length)
        place = bisect.bisect(self._free, Extent(offset, 0))
        if place < len(self._free) and self._free[place].offset == offset + length:
            length += self._free.pop(place).length
        if place and sum(self._free[place - 1]) == offset:
            place -= 1
            offset, length = self._free[place].offset, self._free[place].length + length
            self._free.pop(place)
        if offset + length == self._end:
            self._end = offset
        else:
            self._free.insert(place, Extent(offset, length))

    def memory(self, extent: Extent) -> np.ndarray:
        """The bytes of a block that has been written, uint8 ``[bytes]``; fewer where the file is shorter."""
        end = min(sum(extent), self._size)
        if end > len(self._map):
            # All of the file at a time, so that there are few maps; maps of blocks that are in use stay.
            spare = min(max(1 << 20, self._size >> 3), 1 << 30)
            os.ftruncate(self._file, self._size + spare)
            self._size += spare
            self._map = np.frombuffer(
                mmap.mmap(self._file, self._size, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8
            )
        return self._map[extent.offset : end]

    def sync(self) -> None:
        """Waits until all blocks are on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closes the file; its memory must not be read any more."""
        self._map = np.zeros(0, np.uint8)
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._end)
        os.close(self._file)

    def _taken(self, length: int) -> int:
        """Where so many bytes are free."""
        for place, extent in enumerate(self._free):
            if extent.length >= length:
                del self._free[place]
                if extent.length > length:
                    rest = Extent(extent.offset + length, extent.length - length)
                    self._free.insert(place, rest)
                return extent.offset
        self._end += length
        return self._end - length


def _rounded(length: int) -> int:
    return -(-length // BlockFile.UNIT) * BlockFile.UNIT
