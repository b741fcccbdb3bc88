"""Records: a row of a table with its optimizer state, as bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

from jax_tt._table.table import Table
from jax_tt._tiers.row_bytes import addresses, copy_rows


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
