"""`read_table`: a dense table in a file of any format."""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp

from jax_tt._formats.arrays import open_arrays
from jax_tt._formats.stored import FileError, StoredArrays

_WITHOUT_NAME = "table"


def read_table(
    path: str | os.PathLike[str], name: str | None, option: str = "--name"
) -> tuple[str, Any]:
    """Name and array ``[N, D]`` of floats, read by rows where the format allows it.

    Args:
        path: of the file.
        name: of the array; None where there is only one.
        option: where the user says the name, for messages.
    """
    stored = open_arrays(path)
    chosen = name if name is not None else only_name(stored, 2, "table [N, D]", option)
    array = stored[chosen]
    if len(array.shape) != 2 or not jnp.issubdtype(array.dtype, jnp.floating) or 0 in array.shape:
        raise FileError(
            f"{path}: {chosen or 'the array'} is {array.dtype} {array.shape}; expected floats [N, D]."
        )
    return chosen or _WITHOUT_NAME, array.by_rows()


def only_name(stored: StoredArrays, ndim: int, what: str, option: str = "--name") -> str:
    """The name of the only array with this number of dimensions."""
    fits = [name for name, array in stored.arrays.items() if len(array.shape) == ndim]
    if len(fits) == 1:
        return fits[0]
    if not fits:
        shapes = ", ".join(str(array.shape) for array in list(stored.arrays.values())[:5])
        raise FileError(f"{stored.path}: holds no {what}; the shapes in it are {shapes or 'none'}.")
    few = ", ".join(fits[:10]) + (f" and {len(fits) - 10} more" if len(fits) > 10 else "")
    raise FileError(
        f"{stored.path}: holds {len(fits)} arrays of {ndim} dimensions; say which by {option}: {few}."
    )
