"""Records: a row of a table with its optimizer state, as bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np

from jax_tt._tables.table import Table


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """The arrays of a table that have an entry for every row, one after the other in a record.

    Attributes:
        names: of the arrays, those of the state of the table.
        shapes: of one entry.
        dtypes: of the arrays.
        initial: what entries of new rows are filled with; None for the first array, which has initial rows.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    initial: tuple[float | None, ...]

    @classmethod
    def of(cls, table: Table) -> RecordLayout:
        own = table.row_arrays
        like = jax.eval_shape(table.init, jax.random.key(0))
        shapes = tuple(like[name].shape[1:] for name in own)
        return cls(tuple(own), shapes, tuple(like[name].dtype for name in own), (*own.values(),))

    @property
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

    def records(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Records uint8 ``[n, size]`` of entries ``[n, ...]`` of every array."""
        found = np.empty((len(arrays[0]), self.size), np.uint8)
        for (first, last), array in zip(self._ranges(), arrays, strict=True):
            flat = np.ascontiguousarray(array).reshape(len(array), -1)
            found[:, first:last] = flat.view(np.uint8)
        return found

    def entries(self, records: np.ndarray) -> list[np.ndarray]:
        """The inverse of `records`."""
        parts = zip(self._ranges(), self.shapes, self.dtypes, strict=True)
        return [
            np.ascontiguousarray(records[:, first:last]).view(dtype).reshape(len(records), *shape)
            for (first, last), shape, dtype in parts
        ]

    def _ranges(self) -> list[tuple[int, int]]:
        ends = np.cumsum((0, *self.sizes)).tolist()
        return list(itertools.pairwise(ends))
