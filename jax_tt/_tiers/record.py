"""Records: a row of a table with its optimizer state, as bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jax_tt._tables.dense import DenseTable


@dataclasses.dataclass(frozen=True)
class RecordLayout:
    """The arrays of a table that have an entry for every row, one after the other in a record.

    Attributes:
        names: of the arrays, those of the state of the table.
        shapes: of one entry.
        dtypes: of the arrays.
        initial: what entries of new rows are filled with; the first array has initial rows instead.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    initial: tuple[float, ...]

    @classmethod
    def of(cls, table: DenseTable) -> RecordLayout:
        (rows,) = table.param_names
        (slot_names,) = table.slot_names
        slots = () if table.update is None else table.update.optimizer.slots
        own = [
            (name, slot) for name, slot in zip(slot_names, slots, strict=True) if slot.rows is None
        ]
        shapes = table.trained_shapes
        names = (rows, *(name for name, _ in own))
        return cls(
            names,
            tuple(shapes[name][1:] for name in names),
            (
                np.dtype(jnp.dtype(table.param_dtype)),
                *(np.dtype(table.slot_dtypes[n]) for n, _ in own),
            ),
            (0.0, *(slot.init for _, slot in own)),
        )

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
