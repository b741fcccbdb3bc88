"""The rows that codebooks, levels and rotations are fitted to, and their check."""

from __future__ import annotations

from typing import Any

import numpy as np

# Rows that are read at a time.
_BLOCK = 2**14


def sample_of(
    argument: str, rows: Any, weights: np.ndarray | None, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids ``[s]`` of at most ``size`` rows, drawn by weight, their rows ``[s, D]`` and the weights of these ``[s]``.

    Rows are read in blocks, in the order of their ids; ``argument`` is what the error for one that is not finite begins
    with.
    """
    n = rows.shape[0]
    ids, own = _drawn(weights, n, min(size, n), rng)
    blocks = np.split(ids, np.arange(_BLOCK, len(ids), _BLOCK))
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


def finite(argument: str, block: Any, numbers: Any) -> np.ndarray:
    """Rows in float32; raises for one that is not finite, with its number."""
    block = np.asarray(block).astype(np.float32)
    good = np.isfinite(block).all(axis=1)
    if not good.all():
        bad = numbers[int(np.argmin(good))]
        raise ValueError(f"{argument}: row {bad} holds NaN or infinity; expected finite numbers.")
    return block
