"""Codes of which each gives a row, whose sum is the row of an id."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jax_tt._coded.clusters import kmeans, means, nearest

if TYPE_CHECKING:
    from jax_tt._coded.table import CodedTable
    from jax_tt._progress import Progress

# Rounds in which every code of a row is chosen anew, given the others.
_SWEEPS = 3


def fitted(
    table: CodedTable,
    points: np.ndarray,
    weights: np.ndarray,
    iterations: int,
    rng: np.random.Generator,
    bar: Progress,
) -> np.ndarray:
    """Codebooks float32 ``[m * K, D]``; arguments as in `product.fitted`."""
    m, size = table.num_codes, 1 << table.bits
    step = bar.begin("codebooks", m + iterations)
    codebooks = np.empty((m, size, table.features), np.float32)
    codes = np.empty((len(points), m), np.int32)
    left = points.copy()
    for k in range(m):
        codebooks[k] = kmeans(left, weights, size, iterations, rng)
        codes[:, k] = nearest(left, codebooks[k])
        left -= codebooks[k][codes[:, k]]
        step()
    for _ in range(iterations):
        for k in range(m):
            own = left + codebooks[k][codes[:, k]]
            codebooks[k] = means(own, weights, codes[:, k], codebooks[k])
            left = own - codebooks[k][codes[:, k]]
        _improve(codes, left, codebooks)
        step()
    return codebooks.reshape(m * size, table.features)


def nearest_codes(rows: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    """Codes int32 ``[n, m]`` of rows ``[n, D]`` in codebooks ``[m, K, D]``; not always the nearest."""
    codes = np.empty((len(rows), len(codebooks)), np.int32)
    left = rows.copy()
    for k, own in enumerate(codebooks):
        codes[:, k] = nearest(left, own)
        left -= own[codes[:, k]]
    for _ in range(_SWEEPS):
        _improve(codes, left, codebooks)
    return codes


def _improve(codes: np.ndarray, left: np.ndarray, codebooks: np.ndarray) -> None:
    """Chooses every code anew, given the others, in place; ``left`` are rows less their sums."""
    for k, own in enumerate(codebooks):
        left += own[codes[:, k]]
        codes[:, k] = nearest(left, own)
        left -= own[codes[:, k]]
