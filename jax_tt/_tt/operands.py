"""Cores passed to the algebra, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._tt.cores import TrainSizes, checked_cores


def table_pair(
    a: Sequence[Any], b: Sequence[Any], num_embeddings: int | None = None
) -> tuple[TrainSizes, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Two tables of the same factors."""
    left, a = checked_cores(a, num_embeddings, name="a")
    right, b = checked_cores(b, num_embeddings, name="b")
    if (left.row_factors, left.col_factors) != (right.row_factors, right.col_factors):
        raise ValueError(
            f"b: has row factors {right.row_factors} and column factors {right.col_factors}; expected those of a, "
            f"{left.row_factors} and {left.col_factors}. Only the ranks may differ."
        )
    return left, a, b
