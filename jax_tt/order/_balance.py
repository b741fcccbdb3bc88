"""Moves points between the equal parts of a node to bring them closer to the means of their parts."""

from __future__ import annotations

import numpy as np

_CHUNK = 1 << 22  # distances in memory at once
_ROUNDS = 3


def rebalanced(points: np.ndarray, size: int) -> np.ndarray:
    """Permutation ``[n]`` of the points ``[n, k]``, whose parts are runs of ``size`` points.

    Rounds of k-means with fixed part sizes, as long as the sum of squared distances decreases. Repeated bisection
    separates groups that lie across a cut; k-means uses all means at once and can join them again.
    """
    count = len(points)
    parts = np.arange(count) // size
    sizes = np.bincount(parts)
    best = _inertia(points, parts, sizes)
    for _ in range(_ROUNDS):
        moved = _assigned(points, _means(points, parts, sizes), sizes)
        inertia = _inertia(points, moved, sizes)
        if inertia >= best:
            break
        parts, best = moved, inertia
    return np.argsort(parts, kind="stable")


def _assigned(points: np.ndarray, means: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Part of every point: the nearest one with room.

    Every point is assigned to its nearest part. If this exceeds the room of a part, it keeps the points for which the
    second nearest part is worst, and the others are assigned again, to parts that still have room.
    """
    parts = np.empty(len(points), np.int64)
    waiting = np.arange(len(points))
    room = sizes.copy()
    while len(waiting):
        choice, loss = _choices(points, waiting, means, np.flatnonzero(room))
        ranked = np.lexsort((-loss, choice))
        asked = np.bincount(choice, minlength=len(room))
        first = np.cumsum(asked) - asked
        taken = np.empty(len(waiting), bool)
        taken[ranked] = np.arange(len(waiting)) - first[choice[ranked]] < room[choice[ranked]]
        parts[waiting[taken]] = choice[taken]
        room -= np.minimum(asked, room)
        waiting = waiting[~taken]
    return parts


def _choices(
    points: np.ndarray, waiting: np.ndarray, means: np.ndarray, parts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The nearest of ``parts`` to every point, and the squared distance to the second nearest minus that to it."""
    choice, loss = np.empty(len(waiting), np.int64), np.empty(len(waiting), np.float32)
    open_means = means[parts]
    squares = np.square(open_means).sum(axis=1)
    step = max(1, _CHUNK // len(parts))
    for start in range(0, len(waiting), step):
        some = slice(start, start + step)
        distance = squares - 2 * (points[waiting[some]] @ open_means.T)
        nearest = distance.argmin(axis=1)
        lines = np.arange(len(nearest))
        least = distance[lines, nearest]
        distance[lines, nearest] = np.inf
        choice[some], loss[some] = parts[nearest], distance.min(axis=1) - least
    return choice, loss


def _means(points: np.ndarray, parts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return _sums(points, parts, len(sizes)) / sizes[:, None].astype(np.float32)


def _inertia(points: np.ndarray, parts: np.ndarray, sizes: np.ndarray) -> float:
    """Sum of squared distances to the means, minus the sum of squares of the points."""
    sums = _sums(points, parts, len(sizes)).astype(np.float64)
    return -float((np.square(sums).sum(axis=1) / sizes).sum())


def _sums(points: np.ndarray, parts: np.ndarray, count: int) -> np.ndarray:
    by_column = [np.bincount(parts, column, count) for column in points.T]
    return np.stack(by_column, axis=1).astype(np.float32)
