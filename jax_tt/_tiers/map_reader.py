"""`MapReader`: reads maps of files that other programs may shorten."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import weakref

import numpy as np

from jax_tt._base import ffi

# Buffers of a call of the system.
_MOST = 1024


class UnreadableError(Exception):
    """A file has become shorter since it was mapped, or its disk fails."""


class MapReader:
    """Copies rows of bytes out of memory, such as maps of files.

    A process that reads such a map itself is ended by a signal where the file has become shorter, or where its disk
    fails. Here the system writes the rows to a file in memory, and says if it cannot. Only one thread may use a reader
    at a time.
    """

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._process, self._file = os.getpid(), _file_in_memory()
        weakref.finalize(self, os.close, self._file)
        self._memory = np.zeros(0, np.uint8)

    def rows(self, sources: np.ndarray, size: int) -> np.ndarray:
        """The rows of ``size`` bytes at addresses uint64 ``[n]``, uint8 ``[n, size]``, until the next call.

        Raises:
            UnreadableError: not all bytes can be read.
        """
        if self._process != os.getpid():  # after a fork, the memory is that of the parent, too
            self._open()
        count = len(sources) * size
        if count > len(self._memory):
            os.ftruncate(self._file, count)
            self._memory = np.frombuffer(mmap.mmap(self._file, count), np.uint8)
        if _write_rows(self._file, sources, size) < count:
            raise UnreadableError("its file has become shorter, or cannot be read")
        return self._memory[:count].reshape(-1, size)


def _file_in_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jax_tt_rows")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_rows(file: int, sources: np.ndarray, size: int) -> int:
    """Writes rows to the beginning of a file; returns how many bytes have been written."""
    native = ffi.load("cpu")
    if native is not None:
        return native.write_rows(file, np.ascontiguousarray(sources), size)
    rows = [(ctypes.c_char * size).from_address(source) for source in sources.tolist()]
    done = 0
    for first in range(0, len(rows), _MOST):
        with contextlib.suppress(OSError):
            done += os.pwritev(file, rows[first : first + _MOST], first * size)
    return done
