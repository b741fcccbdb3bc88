"""The container of all that the package writes: arrays by name and a manifest, in a ``.safetensors`` file.

The manifest is a JSON object in the metadata: the kind and the version of the container, a checksum of every array, and
what else is said of them. Beside it is a checksum of the header, which contains the manifest. Every array begins at a
multiple of 64 bytes, so that a memory map of it needs no copy; the format has no gaps, so that arrays of padding are
between them. Files of other programs have no manifest, and are read as they are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from jax_tt._base.arguments import expect, mismatch
from jax_tt._formats.stored import FileError, StoredArray, StoredArrays, in_memory, mapped

# Of arrays on the processor, for which JAX takes memory as it is.
ALIGNMENT = 64
# What the names of padding begin with.
PADDING = "__padding_"
# Where the places of arrays in a tree are, in the manifest.
PLACES = "arrays"
_VERSION = 2
_MANIFEST, _CHECKSUM, _UNKNOWN = "jax_tt", "jax_tt_checksum", "0" * 8
_COPY = "use another copy of it"
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
_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}

Place = tuple[str | int, ...]


class Container:
    """Arrays with their manifest, as a file has them.

    Args:
        kind: what they are.
        arrays: by name, of `DTYPES`.
        notes: what the manifest says beside kind, version and checksums.

    Attributes:
        checksum: of the header, and with it of everything.
    """

    def __init__(self, kind: str, arrays: Mapping[str, Any], notes: Mapping[str, Any]):
        # `ascontiguousarray` would give scalars an axis.
        self._arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        checksums = {name: checksum_of(array) for name, array in self._arrays.items()}
        manifest = {"kind": kind, "version": _VERSION, "checksums": checksums, **notes}
        header: dict[str, Any] = {
            "__metadata__": {_CHECKSUM: _UNKNOWN, _MANIFEST: json.dumps(manifest)}
        }
        end = 0

        def add(name: str, dtype: str, shape: Iterable[int], nbytes: int) -> None:
            nonlocal end
            offsets = [end, end + nbytes]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            end += nbytes

        for k, (name, array) in enumerate(self._arrays.items()):
            if gap := -end % ALIGNMENT:
                add(f"{PADDING}{k}", "U8", (gap,), gap)
            add(name, _NAMES[array.dtype], array.shape, array.nbytes)
        text = json.dumps(header).encode()
        text += b" " * (-(_LENGTH + len(text)) % ALIGNMENT)
        self.checksum = zlib.crc32(text)
        text = _with_checksum(text, _UNKNOWN, f"{self.checksum:08x}")
        self._header = len(text).to_bytes(_LENGTH, "little") + text

    def write(self, path: str) -> None:
        """Writes the file.

        Raises:
            OSError: it cannot be written.
        """
        with open(path, "wb") as file:
            file.write(self._header)
            for array in self._arrays.values():
                file.write(bytes(-file.tell() % ALIGNMENT))
                file.write(_bytes(array))

    def is_at(self, path: str) -> bool:
        """Whether there is such a file, which is not damaged."""
        try:
            with open(path, "rb") as file:
                if file.read(len(self._header)) != self._header:
                    return False
            for array in read_container(path).arrays.values():
                array.read()
        except (FileError, FileNotFoundError):
            return False
        return True


def read_container(path: str, kind: str | None = None) -> StoredArrays:
    """The arrays of a file, which are compared with their checksums when they are read, but not when they are mapped.

    The package safetensors checks the header against the size of the file.

    Args:
        path: of the file.
        kind: of a container; None for files of other programs, too.

    Raises:
        FileError: the file is damaged, or of another kind or version.
    """
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise FileError(f"{path}: is not a complete safetensors file ({error}).") from error
    with open(path, "rb") as file:
        start = _LENGTH + int.from_bytes(file.read(_LENGTH), "little")
        text = file.read(start - _LENGTH)
    header = json.loads(text)
    metadata = header.pop("__metadata__", None) or {}
    notes, checksum = _notes(path, metadata), None
    if (given := metadata.get(_CHECKSUM)) is not None:
        checksum = zlib.crc32(_with_checksum(text, given, _UNKNOWN))
        if given != f"{checksum:08x}":
            raise FileError(f"{path}: its header is damaged, its checksum differs; {_COPY}.")
    if kind is not None and (checksum is None or notes.get("kind") != kind):
        got = notes.get("kind", "no container of this package")
        raise FileError(f"{path}: is {got!r}; expected {kind!r}.")
    sums = notes.get("checksums")
    sums = sums if isinstance(sums, Mapping) else {}
    arrays: dict[str, StoredArray] = {}
    padding: Callable[[], Any] | None = None
    for name, entry in header.items():
        shape, dtype_name = tuple(entry["shape"]), entry["dtype"]
        got = f"{name} of the type {dtype_name}"
        expect(dtype_name in DTYPES, path, got, ", ".join(DTYPES), error=FileError)
        dtype, offset = np.dtype(DTYPES[dtype_name]), start + entry["data_offsets"][0]
        read: Callable[[], Any] = partial(in_memory, path, dtype, offset, shape)
        if name.startswith(PADDING):
            padding = read
            continue
        if name in sums:
            read = partial(_checked, f"{path}: {name}", read, sums[name], padding)
        padding = None
        arrays[name] = StoredArray(shape, dtype, read, partial(mapped, path, dtype, offset, shape))
    return StoredArrays(path, arrays, notes, checksum)


def named(tree: Iterable[tuple[Place, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays of a tree, given with their places, by name; and what the manifest says of the places."""
    arrays: dict[str, Any] = {}
    places = {}
    for place, array in tree:
        name = "/".join(map(str, place))
        if name in arrays or name.startswith(PADDING):
            raise ValueError(f"arrays: got the name {name!r} twice, or one of padding; rename it.")
        arrays[name], places[name] = array, place
    return arrays, {PLACES: places}


def in_places(stored: StoredArrays, take: Callable[[str], Any]) -> dict[str, Any]:
    """The tree of the arrays that `named` has named; ``take`` returns what stands in the place of one."""
    tree: dict[str, Any] = {}
    for name, place in stored.notes[PLACES].items():
        keys = isinstance(place, list) and all(isinstance(key, str | int) for key in place)
        if not keys or "/".join(map(str, place)) != name:
            raise FileError(f"{stored.path}: its metadata is damaged: {name} is at {place!r}.")
        *outer, last = place
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = take(name)
    return tree


def checksum_of(array: np.ndarray) -> int:
    """The checksum of the bytes of a contiguous array."""
    return zlib.crc32(_bytes(array))


def _checked(
    label: str,
    read: Callable[[], np.ndarray],
    checksum: Any,
    padding: Callable[[], np.ndarray] | None,
) -> np.ndarray:
    """An array with this checksum, before which padding is zero."""
    array = read()
    if checksum_of(array) != checksum or (padding is not None and padding().any()):
        raise FileError(f"{label} is damaged, its checksum differs; {_COPY}.")
    return array


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _with_checksum(text: bytes, old: str, new: str) -> bytes:
    """The header with another checksum, which comes first in it."""
    return text.replace(f'"{_CHECKSUM}": "{old}"'.encode(), f'"{_CHECKSUM}": "{new}"'.encode(), 1)


def _notes(path: str, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    try:
        notes = json.loads(metadata.get(_MANIFEST, "{}"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: its metadata is damaged ({error}).") from error
    if not isinstance(notes, dict):
        raise FileError(f"{path}: its metadata is {type(notes).__name__}; expected an object.")
    if "kind" in notes and notes.get("version") != _VERSION:
        fix = "Read it with the version of jax_tt that wrote it."
        raise mismatch(path, f"version {notes.get('version')}", _VERSION, fix, FileError)
    return notes
