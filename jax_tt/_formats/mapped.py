"""`open_arrays` reads files of every known format; `save_arrays` and `map_arrays` share files between processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, expect, mismatch, type_of
from jax_tt._formats.container import (
    DTYPES,
    PLACES,
    Container,
    Place,
    in_places,
    named,
    read_container,
)
from jax_tt._formats.numpy_file import read_npy, read_npz
from jax_tt._formats.orbax_directory import read_orbax
from jax_tt._formats.output import check_output, places_of, writing
from jax_tt._formats.stored import FileError, StoredArrays, whole_file
from jax_tt._formats.torch_file import read_torch

_READERS = {
    ".npy": read_npy,
    ".npz": read_npz,
    ".safetensors": read_container,
    ".pt": read_torch,
    ".pth": read_torch,
}


def open_arrays(path: str | os.PathLike[str]) -> StoredArrays:
    """The arrays of a file, or of an orbax checkpoint where the path is a directory.

    Raises:
        FileError: it does not exist, cannot be read, is damaged, of an unknown format, or dangerous.
    """
    for place in places_of(path):
        if os.path.isdir(place):
            return read_orbax(place)
    name = whole_file(path)
    suffix = Path(name).suffix.lower()
    if suffix not in _READERS:
        expected = f"{', '.join(_READERS)}, or the directory of an orbax checkpoint"
        raise mismatch(name, f"the format {suffix or '(no suffix)'}", expected, error=FileError)
    return _READERS[suffix](name)


_SUFFIX = ".safetensors"


def save_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, Any], *, overwrite: bool = False
) -> None:
    """Writes the arrays of a model to one ``.safetensors`` file, which `map_arrays` opens without reading it.

    Other programs can read the file as well. Array ``{"items": {"packed": ...}}`` has the name ``items/packed``; arrays
    whose names begin with ``__padding_`` align those after them. The output is complete or absent, and replaces a file
    that other processes have open without changing what they see.

    Args:
        path: ends with ``.safetensors``. Its parent folder must exist.
        arrays: nested mappings of arrays by name, or by number, e.g. the state of a `Collection`, or
            ``nnx.to_pure_dict(nnx.state(model))``.
        overwrite: replace an existing file.

    Raises:
        FileError: the path has another suffix, cannot be written, or exists and ``overwrite`` is False.
        TypeError, ValueError: ``arrays`` contains something else, such as keys of a random generator.

    >>> import jax, jax.numpy as jnp, jax_tt, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> jax_tt.files.save_arrays(path, {"items": jax_tt.quantize(jnp.eye(100, 16), bits=4)[1]})
    >>> jax_tt.files.map_arrays(path)["items"]["packed"].shape
    (100, 12)
    """
    if Path(os.fsdecode(path)).suffix.lower() != _SUFFIX:
        raise FileError(f"{os.fsdecode(path)}: unknown suffix; expected {_SUFFIX}.")
    flat, places = named(_flat("arrays", arrays, ()))
    check_output(path, overwrite=overwrite)
    with writing(path, overwrite=overwrite) as new:
        Container("arrays", flat, places).write(new)


def _flat(where: str, given: Any, place: Place) -> Iterator[tuple[Place, np.ndarray]]:
    """Every array with the keys that lead to it."""
    if not isinstance(given, Mapping):
        expect(place, where, type_of(given), "a mapping of arrays", error=TypeError)
        dtype = getattr(given, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
            got = f"{dtype} keys"
            raise mismatch(where, got, "numbers, e.g. jax.random.key_data(key)", error=TypeError)
        array = np.asarray(as_array(where, given))
        if array.dtype not in DTYPES.values():
            raise TypeError(f"{where}: got {array.dtype}; expected one of {', '.join(DTYPES)}.")
        yield place, array
        return
    expect(given or not place, where, "an empty mapping", "arrays, or leave it out")
    for key, value in given.items():
        if not isinstance(key, str) and type(key) is not int:  # which the items of an nnx.List have
            raise TypeError(f"{where}: got the key {key!r}; expected strings or integers.")
        yield from _flat(f"{where}[{key!r}]", value, (*place, key))


def map_arrays(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Maps the arrays that `save_arrays` wrote into memory, in the same nested dictionaries.

    On the CPU they are memory maps of the file: this takes milliseconds whatever their size, a page of the file is
    read when a lookup first needs it, and processes that map the same file share its memory. They may be used like any
    other arrays; what is changed in place, because it is donated to a program, is a copy of the page in this process.
    On other devices they are read and copied. What is mapped is not compared with its checksum.

    The file must not be shortened or written to while it is mapped. Replace it with
    ``save_arrays(..., overwrite=True)`` or by renaming another file.

    Raises:
        FileError: there is no such file (then also a `FileNotFoundError`), it is damaged, or `save_arrays` did not
            write it.
        ValueError: an array has 64 bits, which JAX was not told to keep.

    >>> import jax.numpy as jnp, jax_tt, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> jax_tt.files.save_arrays(path, {"head": {"kernel": jnp.ones((16, 1))}})
    >>> jax_tt.files.map_arrays(path)["head"]["kernel"].sum().item()
    16.0
    """
    stored = open_arrays(path)
    if not isinstance(stored.notes.get(PLACES), Mapping):
        raise FileError(
            f"{stored.path}: was not written by jax_tt.files.save_arrays; it holds {stored.listed()}."
        )
    return in_places(stored, lambda name: _as_jax(f"{stored.path}: {name}", stored[name].by_rows()))


def _as_jax(where: str, array: np.ndarray) -> jax.Array:
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if kept != array.dtype:
        expected = "jax.config.update('jax_enable_x64', True) before, or arrays of 32 bits"
        raise mismatch(where, f"{array.dtype}, which JAX would turn into {kept}", expected)
    return jax.device_put(array, may_alias=True)
