"""`open_arrays`: what a file of any known format holds."""

from __future__ import annotations

import os
from pathlib import Path

from jax_tt._formats.numpy_file import read_npy, read_npz
from jax_tt._formats.orbax_directory import read_orbax
from jax_tt._formats.output import places_of
from jax_tt._formats.safetensors_file import read_safetensors
from jax_tt._formats.stored import FileError, StoredArrays, whole_file
from jax_tt._formats.torch_file import read_torch

_READERS = {
    ".npy": read_npy,
    ".npz": read_npz,
    ".safetensors": read_safetensors,
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
        raise FileError(
            f"{name}: unknown format {suffix or '(no suffix)'}; expected {', '.join(_READERS)}, or the directory of an "
            "orbax checkpoint."
        )
    return _READERS[suffix](name)
