"""`StoredArrays`: the contents of a file, described before the arrays themselves are read."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


class FileError(ValueError):
    """A file that cannot be read or written: missing, damaged, of another format, dangerous, or in the way.

    If Python has an error class for the case, the error is also an instance of that: `FileNotFoundError` if a file or
    folder is missing, `FileExistsError` if an output exists, `PermissionError` if access is denied.

    >>> import jax_tt
    >>> try:
    ...     jax_tt.files.load("nothing.safetensors")
    ... except jax_tt.FileError as error:
    ...     print(error, isinstance(error, FileNotFoundError))
    nothing.safetensors: no such file. True
    """


class MissingError(FileError, FileNotFoundError):
    """What should be there is missing."""


class ExistsError(FileError, FileExistsError):
    """What should be new exists."""


class DeniedError(FileError, PermissionError):
    """The user may not read or write there."""


_SPECIAL = {
    FileNotFoundError: MissingError,
    FileExistsError: ExistsError,
    PermissionError: DeniedError,
}


def in_words(error: OSError, path: str, failed: str) -> FileError:
    """The error as a `FileError` that says what failed."""
    kind = next((ours for theirs, ours in _SPECIAL.items() if isinstance(error, theirs)), FileError)
    return kind(f"{path}: {failed} ({error.strerror or error}).")


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a file.

    Attributes:
        shape, dtype: as the file says, checked against its size.
        read: returns the array in memory.
        map: returns it without reading it, where the format allows it. Memory maps end the process if the file becomes
            shorter while they are in use.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Any]
    map: Callable[[], Any] | None = None

    def by_rows(self) -> Any:
        """The array, or something that is sliced by rows where the format allows it."""
        return (self.map or self.read)()

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
        checksum: of its header, and with it of everything; None for files of other programs.
    """

    path: str
    arrays: Mapping[str, StoredArray]
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checksum: int | None = None

    def __getitem__(self, name: str) -> StoredArray:
        if name not in self.arrays:
            raise FileError(f"{self.path}: no array {name!r}; it holds {self.listed()}.")
        return self.arrays[name]

    def listed(self) -> str:
        """The names, at most ten."""
        names = [name or "one unnamed array" for name in self.arrays]
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        return (", ".join(names[:10]) or "no arrays") + more


def mapped(
    path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], fortran: bool = False
) -> np.ndarray:
    """An array in a file, from a byte on, as a memory map. Changes are private to the process, and do not crash it."""
    if 0 in shape:  # which cannot be mapped
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "c", offset, shape, "F" if fortran else "C")


def in_memory(
    path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], fortran: bool = False
) -> np.ndarray:
    """An array in a file, from a byte on."""
    size = math.prod(shape) * dtype.itemsize
    try:
        data = np.fromfile(path, np.uint8, size, offset=offset)
    except OSError as error:
        raise in_words(error, path, "cannot be read") from error
    if len(data) < size:
        raise FileError(f"{path}: has become shorter while it was read.")
    return data.view(dtype).reshape(shape, order="F" if fortran else "C")


def whole_file(path: str | os.PathLike[str]) -> str:
    """The path of a regular file that can be read and is not empty."""
    name = os.fsdecode(path)
    try:
        status = os.stat(name)
        if stat.S_ISDIR(status.st_mode):
            raise FileError(f"{name}: is a directory; expected a file.")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise FileError(f"{name}: is no regular file.")
        with open(name, "rb"):
            pass
    except FileError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingError(f"{name}: no such file.") from error
    except OSError as error:
        raise in_words(error, name, "cannot be read") from error
    if status.st_size == 0:
        raise FileError(f"{name}: is empty.")
    return name
