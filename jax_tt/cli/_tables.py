"""Vectors and orders of ids that the user names, from files of any format."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_tt._files.tables import only_name
from jax_tt._formats.mapped import open_arrays
from jax_tt._formats.numpy_file import write_npz
from jax_tt._formats.stored import FileError
from jax_tt._ids.id_order import IdOrder


def read_integers(path: str, name: str | None, ndim: int) -> np.ndarray:
    """Integers with this number of dimensions."""
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


def write_order(
    path: str, order: IdOrder, row_factors: tuple[int, ...] | None, overwrite: bool
) -> None:
    """An ``.npz`` file that `IdOrder.load` reads, with the row factors beside it."""
    arrays = {"rows": np.asarray(order.rows)}
    if row_factors is not None:
        arrays["row_factors"] = np.array(row_factors)
    write_npz(path, arrays, overwrite=overwrite)


def _read(path: str, name: str | None, ndim: int, what: str) -> np.ndarray:
    stored = open_arrays(path)
    array = stored[name if name is not None else only_name(stored, ndim, what)]
    if len(array.shape) != ndim:
        raise FileError(
            f"{path}: holds an array of shape {array.shape}; expected {ndim} dimensions."
        )
    return np.asarray(array.by_rows())
