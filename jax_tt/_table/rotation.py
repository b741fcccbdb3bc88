"""The constant orthogonal matrix by which some kinds of tables multiply their rows in the end.

Such a table has the fields ``features`` and ``rotated``, and its state the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.arguments import as_array, mismatch, one_of
from jax_tt._table.state import Array, State

ROTATION = "rotation"
_TOLERANCE = 1e-3


def rotation_array(features: int, collection: str) -> Array:
    """The array in the spec of a state."""
    shape = features, features
    return Array(ROTATION, "constant", shape, jnp.dtype(jnp.float32), collection=collection)


def rotation_of(table: Any, state: State) -> list[jax.Array]:
    """The matrix of a table, which has no gradient, or nothing."""
    return [lax.stop_gradient(state[ROTATION])] if table.rotated else []


def turned(rows: jax.Array, rotation: Sequence[jax.Array], precision: Any) -> jax.Array:
    """Rows, or sums of them, multiplied by the matrix if there is one."""
    for matrix in rotation:
        rows = jnp.matmul(rows, matrix.astype(rows.dtype), precision=precision)
    return rows


def turned_back(rows: jax.Array, rotation: Sequence[jax.Array], precision: Any) -> jax.Array:
    """The inverse of `turned`, which is also its transpose: it takes gradients of sums to gradients of rows."""
    return turned(rows, [matrix.T for matrix in rotation], precision)


def as_rotation(value: Any, features: int, fits: Sequence[str] = ()) -> Any:
    """One of ``fits``, an orthogonal matrix float32 ``[D, D]``, or None."""
    if value is None or isinstance(value, str):
        return None if value is None else one_of(ROTATION, value, fits)
    matrix = np.asarray(as_array(ROTATION, value)).astype(np.float32)
    if matrix.shape != (features, features):
        raise ValueError(f"rotation: got shape {matrix.shape}; expected {(features, features)}.")
    if not np.allclose(matrix @ matrix.T, np.eye(features), atol=_TOLERANCE):
        raise mismatch("rotation", "a matrix that is not orthogonal", "R with R @ R.T = 1")
    return matrix
