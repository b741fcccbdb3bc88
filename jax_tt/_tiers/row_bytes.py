"""Rows as bytes: records of a row with its optimizer state, copies from address to address, and checksums."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

from jax_tt._base import ffi
from jax_tt._table.table import Table

# What zeros, such as a page that was never written, do not have as their checksum.
_START = 0x9E3779B97F4A7C15


def checksums(rows: np.ndarray) -> np.ndarray:
    """A number of 64 bits for every row of bytes, uint8 ``[n, size]``, as uint64 ``[n]``.

    It is the sum of words of 32 bits times odd numbers of 64 bits, so that a change within one word is always noticed,
    and any other unless the differences cancel, for which at least 33 bits of the numbers have to agree by chance.
    (Words of 64 bits would not do: those that differ in their last bit alone, such as the sign of a float, all add the
    same.)
    """
    count, size = rows.shape
    whole = size - size % 4
    sums = np.full(count, _START * (size + 1) % 2**64 | 1, np.uint64)
    factors = _factors(-(-size // 4))
    native = ffi.load("cpu")
    if native is not None:
        native.add_checksums(rows, factors, sums)
        return sums
    if whole:
        words = rows[:, :whole].view(np.uint32)
        sums += np.einsum("ij,j->i", words, factors[: whole // 4], dtype=np.uint64, casting="safe")
    if size % 4:
        rest = np.zeros((count, 4), np.uint8)
        rest[:, : size % 4] = rows[:, whole:]
        sums += rest.view(np.uint32)[:, 0] * factors[-1]
    return sums


def checksum(data: bytes | np.ndarray) -> int:
    """The checksum of some bytes."""
    return int(checksums(np.frombuffer(data, np.uint8).reshape(1, -1))[0])


@functools.lru_cache(maxsize=64)
def _factors(count: int) -> np.ndarray:
    return np.random.Philox(key=1).random_raw(count) | np.uint64(1)


def addresses(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The addresses uint64 ``[n]`` of rows of a contiguous array, which must outlive them."""
    assert array.flags.c_contiguous
    first: int = array.__array_interface__["data"][0]
    width = array.dtype.itemsize * (array[:1].size if len(array) else 0)
    return (rows * width + first).astype(np.uint64)


def copy_rows(sources: np.ndarray, targets: np.ndarray, size: int) -> None:
    """Copies ``size`` bytes from every address to the one beside it; no target overlaps another row."""
    native = ffi.load("cpu")
    if native is not None:
        native.copy_rows(np.ascontiguousarray(sources), np.ascontiguousarray(targets), size)
        return
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """The arrays of a table that have an entry for every row, one after the other in a record.

    Attributes:
        names: of the arrays, as in the state of the table.
        shapes: of one entry.
        dtypes: of the arrays.
        initial: value of new entries; None for the first array, which has initial rows.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    initial: tuple[float | None, ...]

    @classmethod
    def of(cls, table: Table) -> RecordLayout:
        arrays = table.spec.row_arrays
        like = jax.eval_shape(table.init, jax.random.key(0))
        shapes = tuple(like[name].shape[1:] for name in arrays)
        return cls(
            tuple(arrays), shapes, tuple(like[name].dtype for name in arrays), (*arrays.values(),)
        )

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the entries."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return tuple(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)

    @property
    def size(self) -> int:
        """Bytes of a record."""
        return sum(self.sizes)

    def about(self) -> dict[str, str]:
        """A description of the layout for files."""
        parts = zip(self.names, self.shapes, self.dtypes, strict=True)
        return {name: f"{dtype.name}{list(shape)}" for name, shape, dtype in parts}

    def empty(self, count: int) -> list[np.ndarray]:
        """Arrays of so many entries, which are not initialised."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [np.empty((count, *shape), dtype) for shape, dtype in pairs]

    def pack(self, arrays: Sequence[np.ndarray], rows: np.ndarray, records: np.ndarray) -> None:
        """Copies the entries in some rows of every array to records, which are given by their addresses."""
        for first, size, array in zip(self._firsts, self.sizes, arrays, strict=True):
            copy_rows(addresses(array, rows), records + first, size)

    def unpack(self, records: np.ndarray, arrays: Sequence[np.ndarray], rows: np.ndarray) -> None:
        """The inverse of `pack`."""
        for first, size, array in zip(self._firsts, self.sizes, arrays, strict=True):
            copy_rows(records + first, addresses(array, rows), size)

    @functools.cached_property
    def _firsts(self) -> list[np.uint64]:
        """Where the entries begin in a record."""
        return [np.uint64(first) for first in itertools.accumulate((0, *self.sizes[:-1]))]
