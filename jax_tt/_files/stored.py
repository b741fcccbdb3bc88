"""`StoredArrays`: what a file holds, known before the arrays themselves are read."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class FileError(ValueError):
    """A file that cannot be read: missing, cut short, of another format, or dangerous to read."""


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a file.

    Attributes:
        shape, dtype: as the file says, checked against its size.
        read: returns the array, or something that is sliced by rows where the format allows it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class StoredArrays:
    """The arrays of a file or checkpoint.

    Attributes:
        path: of the file.
        arrays: by name; the array of an ``.npy`` file has the name "".
        notes: what the file says beside the arrays, a JSON object, unchecked.
    """

    path: str
    arrays: Mapping[str, StoredArray]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __getitem__(self, name: str) -> StoredArray:
        if name not in self.arrays:
            raise FileError(f"{self.path}: no array {name!r}; it holds {self.listed()}.")
        return self.arrays[name]

    def listed(self) -> str:
        """The names, at most ten."""
        names = [name or "one unnamed array" for name in self.arrays]
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        return (", ".join(names[:10]) or "no arrays") + more


def whole_file(path: str | os.PathLike[str]) -> str:
    """The path of a regular file that exists."""
    name = os.fspath(path)
    if os.path.isdir(name):
        raise FileError(f"{name}: is a directory; expected a file.")
    if not os.path.exists(name):
        raise FileError(f"{name}: no such file.")
    if not os.path.isfile(name):
        raise FileError(f"{name}: is no regular file.")
    if os.path.getsize(name) == 0:
        raise FileError(f"{name}: is empty.")
    return name
