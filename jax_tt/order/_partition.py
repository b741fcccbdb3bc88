"""Divides points into equal parts, level by level, so that nearby points share leading digits of a mixed radix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jax_tt._base.arguments import instance_of
from jax_tt._base.progress import Progress
from jax_tt._tt.shape import TTShape

_BLOCK = 1 << 22  # array elements of a block of nodes that is processed at once
_POWERS = 5  # power iterations for the principal direction
_CHUNK = 1 << 22  # distances in memory at once
_ROUNDS = 3  # of k-means to rebalance parts
_SMALLEST_PART = 16  # to rebalance; the means of smaller parts are not meaningful
_MEANS = 6  # rounds of 2-means after the split along the principal direction


def as_shape(value: Any) -> TTShape:
    """Checks that the argument is a `TTShape`."""
    expected = (
        "the TTShape of the table, e.g. layer.tt_shape or TTShape.suggest(num_embeddings, features)"
    )
    instance_of("shape", value, TTShape, expected)
    return value


def partition(points: np.ndarray, row_factors: Sequence[int], progress: Progress) -> np.ndarray:
    """An order of points in which nearby ones share leading digits.

    The points of a node are bisected repeatedly until every part fills one digit; the part counts of the halves differ
    by at most one, and only the very last part may be smaller than the others. A cut is perpendicular to the principal
    direction of the node and is improved by rounds of 2-means with fixed sizes; all nodes of equal size are cut
    together. The parts of a digit are then rebalanced.

    Takes points float32 ``[n, k]`` with ``n <= prod(row_factors)``, and returns the point of each row, int64 ``[n]``.
    """
    order = np.arange(len(points))
    starts = np.zeros(1, np.int64)
    for level in range(len(row_factors)):
        size, nodes_of_level = math.prod(row_factors[level + 1 :]), starts
        while True:
            lengths = np.diff(starts, append=len(points))
            if lengths.max(initial=0) <= size:
                break
            fresh = []
            for length in np.unique(lengths[lengths > size]):
                parts = math.ceil(int(length) / size)
                left = math.ceil(parts / 2) * size
                nodes = starts[lengths == length]
                for block in _blocks(nodes, int(length) * points.shape[1]):
                    places = block[:, None] + np.arange(length)
                    members = order[places]
                    order[places] = np.take_along_axis(members, _cut(points[members], left), axis=1)
                fresh.append(nodes + left)
            starts = np.sort(np.concatenate([starts, *fresh]))
            progress.step()
        if size >= _SMALLEST_PART:
            for node in np.split(order, nodes_of_level[1:]):
                node[:] = node[_rebalanced(points[node], size)]
    return order


def rounds(count: int, row_factors: Sequence[int]) -> int:
    """Number of progress steps of `partition` for ``count`` points."""
    total, most = 0, count
    for level in range(len(row_factors)):
        size = math.prod(row_factors[level + 1 :])
        parts = math.ceil(most / size)
        total += max(parts - 1, 0).bit_length()
        most = min(most, size)
    return total


def _blocks(nodes: np.ndarray, numbers: int) -> Iterator[np.ndarray]:
    step = max(1, _BLOCK // numbers)
    return (nodes[i : i + step] for i in range(0, len(nodes), step))


def _cut(points: np.ndarray, left: int) -> np.ndarray:
    """Permutations ``[m, n]`` of the points ``[m, n, k]`` of ``m`` nodes, with the first half before the second."""
    length = points.shape[1]
    points = points - points.mean(axis=1, keepdims=True)
    direction = _principal_directions(points)
    places = _along(points, direction)
    if left == 1 or length < 8:
        return places
    for _ in range(_MEANS):
        total = np.take_along_axis(points, places[:, left:, None], axis=1).sum(axis=1)
        # The points of a node sum to 0, so the difference of the means of the halves is parallel to this sum.
        direction = np.where(np.any(total != 0, axis=1, keepdims=True), total, direction)
        before, places = places, _along(points, direction)
        if np.array_equal(before, places):
            break
    return places


def _along(points: np.ndarray, direction: np.ndarray) -> np.ndarray:
    return np.argsort(_heights(points, direction), axis=1, kind="stable")


def _heights(points: np.ndarray, direction: np.ndarray) -> np.ndarray:
    # Not matmul: for thousands of small products, the synchronisation of BLAS threads would dominate.
    return np.einsum("mnk,mk->mn", points, direction)


def _principal_directions(points: np.ndarray) -> np.ndarray:
    """Approximate principal directions ``[m, k]`` of centred points, with a positive largest coordinate.

    A few power iterations from the axis of largest variance give a sufficient start for the rounds of 2-means.
    """
    variance = np.einsum("mnk,mnk->mk", points, points)
    direction = (variance == variance.max(axis=1, keepdims=True)).astype(points.dtype)
    for _ in range(_POWERS):
        direction = np.einsum("mnk,mn->mk", points, _heights(points, direction))
        largest = np.abs(direction).max(axis=1, keepdims=True)
        direction /= np.where(largest > 0, largest, 1)
    # With this sign, parts of different nodes that are on the same side get the same digits.
    largest = np.take_along_axis(direction, np.abs(direction).argmax(1)[:, None], axis=1)
    return direction * np.where(largest < 0, np.float32(-1), np.float32(1))


def _rebalanced(points: np.ndarray, size: int) -> np.ndarray:
    """Permutation ``[n]`` of the points ``[n, k]``, whose parts are runs of ``size`` points.

    Rounds of k-means with fixed part sizes, as long as the sum of squared distances decreases. Repeated bisection
    separates groups that lie across a cut; k-means uses all means at once and can join them again.
    """
    count = len(points)
    parts = np.arange(count) // size
    sizes = np.bincount(parts)
    best = _inertia(points, parts, sizes)
    for _ in range(_ROUNDS):
        means = _sums(points, parts, len(sizes)) / sizes[:, None].astype(np.float32)
        moved = _assigned(points, means, sizes)
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


def _inertia(points: np.ndarray, parts: np.ndarray, sizes: np.ndarray) -> float:
    """Sum of squared distances to the means, minus the sum of squares of the points."""
    sums = _sums(points, parts, len(sizes)).astype(np.float64)
    return -float((np.square(sums).sum(axis=1) / sizes).sum())


def _sums(points: np.ndarray, parts: np.ndarray, count: int) -> np.ndarray:
    by_column = [np.bincount(parts, column, count) for column in points.T]
    return np.stack(by_column, axis=1).astype(np.float32)
