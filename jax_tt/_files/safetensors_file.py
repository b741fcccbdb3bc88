"""``.safetensors`` files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._files.stored import FileError, StoredArray, StoredArrays
from jax_tt._requires import require

_KEY = "jax_tt"
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class _Slices:
    """An array of a file, read by slices of rows."""

    def __init__(self, file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self._slice, self.shape, self.dtype = file.get_slice(name), shape, dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self._slice[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # always one
        return np.asarray(self._slice[:], dtype)


def read_safetensors(path: str) -> StoredArrays:
    """The arrays of a file, whose header the package checks against its size."""
    safetensors = require("safetensors", "Reading .safetensors files", "cli")
    try:
        file = safetensors.safe_open(path, framework="numpy")
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: is no whole safetensors file ({error}).") from error
    found = {}
    for name in file.keys():  # noqa: SIM118 (no dict)
        part = file.get_slice(name)
        shape, kind = tuple(part.get_shape()), part.get_dtype()
        if kind not in _DTYPES:
            raise FileError(f"{path}: {name} is of the type {kind}; expected {', '.join(_DTYPES)}.")
        dtype = np.dtype(_DTYPES[kind])
        read = (
            partial(_Slices, file, name, shape, dtype) if shape else partial(file.get_tensor, name)
        )
        found[name] = StoredArray(shape, dtype, read)
    return StoredArrays(path, found, _notes(path, file.metadata() or {}))


def write_safetensors(path: str, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """The file is complete or absent, whenever the process is killed."""
    numpy = require("safetensors.numpy", "Writing .safetensors files", "cli")
    unfinished = f"{path}.unfinished"
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    try:
        numpy.save_file(whole, unfinished, metadata={_KEY: json.dumps(notes)})
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.remove(unfinished)


def _notes(path: str, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    try:
        notes = json.loads(metadata.get(_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: its metadata is damaged ({error}).") from error
    if not isinstance(notes, dict):
        raise FileError(f"{path}: its metadata is {type(notes).__name__}; expected an object.")
    return notes
