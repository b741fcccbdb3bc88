"""The rows that codebooks, levels and rotations are fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._coded.assign import BLOCK, finite


def sample_of(
    argument: str, rows: Any, weights: np.ndarray | None, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids ``[s]`` of at most ``size`` rows, drawn by weight, their rows ``[s, D]`` and the weights of these ``[s]``.

    Rows are read in blocks, in the order of their ids; ``argument`` is what the error for one that is not finite begins
    with.
    """
    n = rows.shape[0]
    ids, own = _drawn(weights, n, min(size, n), rng)
    blocks = np.split(ids, np.arange(BLOCK, len(ids), BLOCK))
    return ids, np.concatenate([finite(argument, rows[some], some) for some in blocks]), own


def _drawn(
    weights: np.ndarray | None, n: int, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    if size == n:
        return np.arange(n), np.ones(n) if weights is None else weights
    if weights is None:
        return np.sort(rng.choice(n, size, replace=False)), np.ones(size)
    drawn = np.searchsorted(np.cumsum(weights), rng.random(size) * weights.sum(), side="right")
    ids, own = np.unique(np.minimum(drawn, n - 1), return_counts=True)
    return ids, own.astype(np.float64)
