"""k-means with weights."""

from __future__ import annotations

import numpy as np
import scipy

from jax_tt._kinds.coded.search import nearest

_COLUMNS = 16  # that are added up at a time


def means(
    points: np.ndarray, weights: np.ndarray, codes: np.ndarray, old: np.ndarray
) -> np.ndarray:
    """Weighted means of the points of every code; centers without points stay as they are."""
    total = np.bincount(codes, weights, len(old))
    sums = sums_of(points, weights[:, None], codes[:, None], len(old))
    filled = total > 0
    new = old.copy()
    new[filled] = sums[filled] / total[filled, None]
    return new


def sums_of(points: np.ndarray, weights: np.ndarray, codes: np.ndarray, count: int) -> np.ndarray:
    """Weighted sums ``[count, d]`` of the points ``[n, d]`` of every code; codes and their weights are ``[n, m]``."""
    n, m = codes.shape
    ends = np.arange(0, n * m + 1, m)
    uses = scipy.sparse.csr_array((weights.ravel(), codes.ravel(), ends), (n, count)).T
    # A few columns at a time, since their products are of a copy of them in float64.
    starts = range(0, points.shape[1], _COLUMNS)
    return np.concatenate([uses @ points[:, k : k + _COLUMNS] for k in starts], axis=1)


def kmeans(
    points: np.ndarray, weights: np.ndarray, count: int, iterations: int, rng: np.random.Generator
) -> np.ndarray:
    """Centers float32 ``[count, d]`` with a small weighted squared distance of points ``[n, d]`` to the nearest."""
    centers = _chosen(points, weights, count, rng)
    for _ in range(iterations):
        codes = nearest(points, centers)
        centers = means(points, weights, codes, centers)
        _refill(points, weights, codes, centers)
    return centers


def _chosen(
    points: np.ndarray, weights: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Initial centers: different points, likelier the higher their weights."""
    if len(points) <= count:
        return points[np.arange(count) % len(points)].copy()
    # The largest of these are a sample without replacement.
    keys = np.log(np.maximum(weights, 1e-30)) + rng.gumbel(size=len(points))
    return points[np.sort(np.argpartition(-keys, count)[:count])].copy()


def _refill(
    points: np.ndarray, weights: np.ndarray, codes: np.ndarray, centers: np.ndarray
) -> None:
    """Moves centers without points to the points that are worst represented, in place."""
    empty = np.flatnonzero(np.bincount(codes, minlength=len(centers)) == 0)
    if not len(empty):
        return
    away = points - centers[codes]
    errors = weights * np.einsum("nd,nd->n", away, away)
    worst = np.argsort(-errors, kind="stable")[: len(empty)]
    worst = worst[errors[worst] > 0]
    centers[empty[: len(worst)]] = points[worst]
