"""``.safetensors`` files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._files.stored import FileError, StoredArray, StoredArrays, mapped
from jax_tt._requires import require

_KEY = "jax_tt"
_LENGTH = 8  # bytes of the header's length, which come first
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


def read_safetensors(path: str) -> StoredArrays:
    """The arrays of a file as memory maps; the package checks the header against the size of the file."""
    safetensors = require("safetensors", "Reading .safetensors files", "cli")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            notes = _notes(path, file.metadata() or {})
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: is no whole safetensors file ({error}).") from error
    with open(path, "rb") as file:
        start = _LENGTH + int.from_bytes(file.read(_LENGTH), "little")
        header = json.loads(file.read(start - _LENGTH))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        shape, kind = tuple(entry["shape"]), entry["dtype"]
        if kind not in _DTYPES:
            raise FileError(f"{path}: {name} is of the type {kind}; expected {', '.join(_DTYPES)}.")
        dtype, offset = np.dtype(_DTYPES[kind]), start + entry["data_offsets"][0]
        found[name] = StoredArray(shape, dtype, partial(mapped, path, dtype, offset, shape))
    return StoredArrays(path, found, notes)


def write_safetensors(path: str, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    numpy = require("safetensors.numpy", "Writing .safetensors files", "cli")
    safetensors = require("safetensors", "Writing .safetensors files", "cli")
    # `ascontiguousarray` would give scalars an axis.
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        numpy.save_file(whole, path, metadata={_KEY: json.dumps(notes)})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def _notes(path: str, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    try:
        notes = json.loads(metadata.get(_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: its metadata is damaged ({error}).") from error
    if not isinstance(notes, dict):
        raise FileError(f"{path}: its metadata is {type(notes).__name__}; expected an object.")
    return notes
