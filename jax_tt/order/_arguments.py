"""Checks of the arguments of functions that make orders."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base.arguments import as_array
from jax_tt._tt.shape import TTShape


def as_counts(name: str, value: Any, num_embeddings: int | None = None) -> np.ndarray:
    """Counts as float64 ``[N]``, checked to be finite and at least 0."""
    counts = np.asarray(as_array(name, value))
    wanted = "[N] with N >= 1" if num_embeddings is None else f"[{num_embeddings}]"
    if counts.ndim != 1 or not counts.size or num_embeddings not in (None, counts.size):
        raise ValueError(f"{name}: got shape {counts.shape}; expected {wanted}.")
    counts = counts.astype(np.float64)
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError(f"{name}: got negative or non-finite values; expected numbers >= 0.")
    return counts


def as_shape(value: Any) -> TTShape:
    """Checks that the argument is a `TTShape`."""
    if not isinstance(value, TTShape):
        raise TypeError(
            f"shape: got {value!r}; expected the TTShape of the table, e.g. layer.tt_shape or "
            "jax_tt.TTShape.suggest(num_embeddings, features)."
        )
    return value
