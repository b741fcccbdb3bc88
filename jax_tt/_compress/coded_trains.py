"""Codebooks that are compressed to one tensor train."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_tt._kinds.coded.layout import CodeLayout
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.shape import TTShape
from jax_tt.order._table import from_table


def shape_of_rank(layout: CodeLayout, rank: int) -> TTShape:
    """Two cores: the rows of a codebook that share the first half of the bits of their codes share ``rank`` vectors."""
    low = layout.bits // 2
    rows = layout.num_entries >> low, 1 << low
    return TTShape(layout.num_entries, layout.width, rank, rows, (layout.width, 1))


def compressed(
    layout: CodeLayout, shape: TTShape, codebooks: np.ndarray, dtype: Any
) -> dict[str, jax.Array]:
    """Cores of codebooks ``[m * K, width]``, whose rows are in another order: codes have to be chosen anew.

    In the order, similar rows of a codebook share the first digit, which costs nothing, as codes are numbers without a
    meaning of their own.
    """
    first, second = shape.row_factors
    of_one = TTShape(
        1 << layout.bits, layout.width, 1, (first // layout.all_codes, second), (layout.width, 1)
    )
    ordered = [
        own[from_table(own, of_one, progress=False).inverse.rows]
        for own in np.split(codebooks, layout.all_codes)
    ]
    options: dict[str, Any] = {"shape": shape, "dtype": dtype}
    cores = tt_from_dense(np.concatenate(ordered), **options).cores
    return {f"core_{k}": core for k, core in enumerate(cores)}
