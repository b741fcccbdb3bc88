"""``.npy`` and ``.npz`` files; arrays of objects, which are pickles, are refused."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from jax_tt._base.host_table import in_native_order, native_type
from jax_tt._formats.archive import check_member, member_bytes, opened
from jax_tt._formats.output import writing
from jax_tt._formats.stored import FileError, StoredArray, StoredArrays, in_memory, mapped

_MAGIC = b"\x93NUMPY"


def read_npy(path: str) -> StoredArrays:
    """The array of an ``.npy`` file."""
    with open(path, "rb") as file:
        shape, dtype, fortran = _header(file, path, os.path.getsize(path))
        offset = file.tell()

    def using(take: Callable[..., np.ndarray]) -> Any:
        return in_native_order(take(path, dtype, offset, shape, fortran))

    array = StoredArray(
        shape, native_type(dtype), partial(using, in_memory), partial(using, mapped)
    )
    return StoredArrays(path, {"": array})


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, Any], *, overwrite: bool) -> None:
    with writing(path, overwrite=overwrite) as new, open(new, "wb") as file:
        np.savez_compressed(file, **arrays)


def read_npz(path: str) -> StoredArrays:
    """The arrays of an ``.npz`` file; they are read as a whole."""
    with opened(path, "npz") as archive:
        arrays = {}
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name == info.filename:
                raise FileError(f"{path}: holds {info.filename}; expected .npy members only.")
            check_member(info, path)
            where = f"{path}: {info.filename}"
            with archive.open(info) as file:
                shape, dtype, _ = _header(file, where, info.file_size)
            arrays[name] = StoredArray(
                shape, native_type(dtype), partial(_member, path, info, where)
            )
    return StoredArrays(path, arrays)


def _member(path: str, info: zipfile.ZipInfo, where: str) -> np.ndarray:
    with opened(path, "npz") as archive:
        data = member_bytes(archive, info, path)
    shape, dtype, fortran = _header(file := io.BytesIO(data), where, len(data))
    array = np.frombuffer(data, dtype, offset=file.tell(), count=math.prod(shape))
    array = array.reshape(shape, order="F" if fortran else "C")
    return array.astype(native_type(dtype), copy=False)


def _header(file: Any, where: str, size: int) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Shape, type and whether the order is Fortran's, with the size of the file confirmed."""
    start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise FileError(f"{where}: is no .npy file: it begins with {start!r}.")
    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
    major = (file.read(2) or b"\0")[0]
    if major not in read:
        raise FileError(f"{where}: .npy version {major}; expected 1 or 2, those of plain arrays.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers as Python 2 wrote them
            shape, fortran, dtype = read[major](file)
    except Exception as error:  # what the parsers of headers raise depends on numpy's version
        raise FileError(f"{where}: the header is damaged ({error}).") from error
    if dtype.hasobject:
        raise FileError(
            f"{where}: holds Python objects, which are pickles and may run code when read; expected numbers."
        )
    if any(length < 0 for length in shape):
        raise FileError(f"{where}: the header claims the shape {shape}.")
    held, claimed = size - file.tell(), math.prod(shape) * dtype.itemsize
    if held < claimed:
        raise FileError(
            f"{where}: the header claims {claimed:,} bytes for {dtype} {shape}, the file holds {held:,}; it was cut "
            "short or damaged."
        )
    return shape, dtype, fortran
