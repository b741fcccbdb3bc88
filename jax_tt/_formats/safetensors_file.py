"""``.safetensors`` files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from jax_tt._formats.stored import FileError, StoredArray, StoredArrays, in_memory, mapped

# Of arrays on the processor, for which JAX takes memory as it is.
ALIGNMENT = 64
# What the names of padding begin with.
PADDING = "__padding_"
_KEY = "jax_tt"
_LENGTH = 8  # bytes of the header's length, which come first
DTYPES: dict[str, Any] = {
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
    """The arrays of a file; the package checks the header against the size of the file."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            notes = _notes(path, file.metadata() or {})
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: is no whole safetensors file ({error}).") from error
    with open(path, "rb") as file:
        start = _LENGTH + int.from_bytes(file.read(_LENGTH), "little")
        header = json.loads(file.read(start - _LENGTH))
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        shape, kind = tuple(entry["shape"]), entry["dtype"]
        if kind not in DTYPES:
            raise FileError(f"{path}: {name} is of the type {kind}; expected {', '.join(DTYPES)}.")
        dtype, offset = np.dtype(DTYPES[kind]), start + entry["data_offsets"][0]
        arrays[name] = StoredArray(
            shape,
            dtype,
            partial(in_memory, path, dtype, offset, shape),
            partial(mapped, path, dtype, offset, shape),
        )
    return StoredArrays(path, arrays, notes)


def write_safetensors(path: str, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    # `ascontiguousarray` would give scalars an axis.
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    try:
        save_file(whole, path, metadata={_KEY: json.dumps(notes)})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error


def write_aligned(path: str, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """The same with every array at a multiple of `ALIGNMENT` bytes, so that a memory map of it needs no copy.

    The format has no gaps, so that arrays of padding are between them.
    """
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(notes)}}
    end, names = 0, {np.dtype(kind): name for name, kind in DTYPES.items()}

    def add(name: str, dtype: str, shape: Sequence[int], nbytes: int) -> None:
        nonlocal end
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes

    for k, (name, array) in enumerate(arrays.items()):
        add(name, names[array.dtype], array.shape, array.nbytes)
        if gap := -end % ALIGNMENT:
            add(f"{PADDING}{k}", "U8", (gap,), gap)
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH + len(text)) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(_LENGTH, "little") + text)
        for array in arrays.values():
            np.asarray(array, order="C").tofile(file)
            file.write(bytes(-array.nbytes % ALIGNMENT))


def _notes(path: str, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    try:
        notes = json.loads(metadata.get(_KEY, "{}"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: its metadata is damaged ({error}).") from error
    if not isinstance(notes, dict):
        raise FileError(f"{path}: its metadata is {type(notes).__name__}; expected an object.")
    return notes
