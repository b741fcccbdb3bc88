"""Tables and vectors that the user names, from files of any format."""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._files.arrays import open_arrays
from jax_tt._files.stored import FileError, StoredArrays
from jax_tt.order import IdOrder

_WITHOUT_NAME = "table"


def read_table(path: str, name: str | None) -> tuple[str, Any]:
    """Name and array ``[N, D]`` of floats, read by rows where the format allows it."""
    stored = open_arrays(path)
    chosen = name if name is not None else _only(stored, 2, "table [N, D]")
    array = stored[chosen]
    if len(array.shape) != 2 or not jnp.issubdtype(array.dtype, jnp.floating) or 0 in array.shape:
        raise FileError(
            f"{path}: {chosen or 'the array'} is {array.dtype} {array.shape}; expected floats [N, D]."
        )
    return chosen or _WITHOUT_NAME, array.read()


def read_integers(path: str, name: str | None, ndim: int) -> np.ndarray:
    """Integers of so many dimensions."""
    array = _read(path, name, ndim, f"array of {ndim} dimensions")
    if array.dtype.kind not in "iu":
        raise FileError(f"{path}: holds {array.dtype}; expected integers.")
    return array


def read_numbers(path: str, name: str | None = None) -> np.ndarray:
    """A vector of real numbers."""
    array = _read(path, name, 1, "vector")
    if not (jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.kind in "iu"):
        raise FileError(f"{path}: holds {array.dtype}; expected numbers.")
    return array


def read_order(path: str) -> tuple[IdOrder, tuple[int, ...] | None]:
    """An order and the row factors that it was made for, as `write_order` wrote them; or only an order."""
    stored = open_arrays(path)
    rows = np.asarray(stored["rows"].read())
    factors = stored.arrays.get("row_factors")
    try:
        order = IdOrder(rows)
        p = None if factors is None else tuple(int(x) for x in np.asarray(factors.read()))
    except (ValueError, TypeError) as error:
        raise FileError(f"{path}: is no order of ids: {error}") from error
    return order, p


def write_order(path: str, order: IdOrder, row_factors: tuple[int, ...] | None) -> None:
    """An ``.npz`` file that `IdOrder.load` reads, with the row factors beside it."""
    rows, unfinished = np.asarray(order.rows), f"{path}.unfinished"
    with open(unfinished, "wb") as file:
        if row_factors is None:
            np.savez_compressed(file, rows=rows)
        else:
            np.savez_compressed(file, rows=rows, row_factors=np.array(row_factors))
    os.replace(unfinished, path)


def _read(path: str, name: str | None, ndim: int, what: str) -> np.ndarray:
    stored = open_arrays(path)
    array = stored[name if name is not None else _only(stored, ndim, what)]
    if len(array.shape) != ndim:
        raise FileError(
            f"{path}: holds an array of shape {array.shape}; expected {ndim} dimensions."
        )
    return np.asarray(array.read())


def _only(stored: StoredArrays, ndim: int, what: str) -> str:
    """The name of the only array of so many dimensions."""
    fits = [name for name, array in stored.arrays.items() if len(array.shape) == ndim]
    if len(fits) == 1:
        return fits[0]
    if not fits:
        shapes = ", ".join(str(array.shape) for array in list(stored.arrays.values())[:5])
        raise FileError(f"{stored.path}: holds no {what}; the shapes in it are {shapes or 'none'}.")
    few = ", ".join(fits[:10]) + (f" and {len(fits) - 10} more" if len(fits) > 10 else "")
    raise FileError(
        f"{stored.path}: holds {len(fits)} arrays of {ndim} dimensions; say which by --name: {few}."
    )
