"""Moves ids within the blocks of the last digit to the nearest rows of a fitted tensor train."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._base.requires import require
from jax_tt._ops.to_dense import tt_to_dense
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.shape import TTShape


def refined(
    points: np.ndarray, order: np.ndarray, shape: TTShape, rounds: int, progress: Progress
) -> np.ndarray:
    """The order ``[n]`` after rounds of fitting and assigning.

    The rows of one prefix are a fixed pattern of ``p_d`` points, transformed by the cores of the prefix. A round fits
    the cores to the points in their current order, and then assigns the ids of every prefix to the rows of its pattern
    at the least sum of squared distances (an assignment problem, solved exactly). The second step never increases the
    error, and the first step increases it at most by the suboptimality of TT-SVD.

    Args:
        points: float32 ``[n, k]``.
        order: int64 ``[n]``: the point of row 0, of row 1, and so on.
        shape: factors and ranks of the tensor train.
        rounds: number of rounds.
        progress: advanced in every round.
    """
    assign = require(
        "scipy.optimize", "order.from_table(refine=...)", "order"
    ).linear_sum_assignment
    order, count, size = order.copy(), len(points), shape.row_factors[-1]
    for _ in range(rounds):
        rows = _fitted(points[order], shape)
        for start in range(0, count, size):
            ids, places = order[start : start + size], rows[start : start + size]
            distance = 0.5 * np.square(places).sum(axis=1) - points[ids] @ places.T
            which, place = assign(distance)
            order[start + place] = ids[which]
        progress.step()
    return order


def _fitted(points: np.ndarray, shape: TTShape) -> Any:
    return np.asarray(tt_to_dense(tt_from_dense(points, shape=shape).cores, len(points)))
