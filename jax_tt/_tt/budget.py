"""Ranks, factors and number of cores for a given number of parameters.

If the table is available, its singular values determine the benefit of a rank. Otherwise a model does, in which the
squares of the singular values of every unfolding decrease as 1, 1/2, 1/3, ... The squared error of a train is at most
the sum, over its cuts, of the squared singular values that each cut discards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jax_tt._tt.factor import balanced_cover, exact_factors

_NOISE = 1e-14  # share of the whole below which a singular value is rounding
_CLOSE = 1.02  # errors within this factor of each other are alike; the cheaper shape is taken


def ranks_for(
    tails: Sequence[np.ndarray], sizes: Sequence[int], max_params: int
) -> tuple[int, ...] | None:
    """Ranks with at most ``max_params`` parameters that discard as little as possible, chosen greedily.

    The next parameters always go where they reduce the error most per parameter.

    Args:
        tails: for every cut, ``tails[k][r]`` is the squared error of rank r; all possible ranks have an entry.
        sizes: ``p_k q_k`` of every core.
        max_params: parameters of all cores together.

    Returns:
        The ranks of the cuts, or None if even ranks of 1 have too many parameters.
    """
    ranks = [1] * len(tails)
    if _params(ranks, sizes) > max_params:
        return None
    floors = [_NOISE * tail[0] for tail in tails]
    while True:
        best, chosen = 0.0, None
        for k, tail in enumerate(tails):
            step = _largest_step(ranks, k, len(tail) - 1, sizes, max_params)
            if step == 0:
                continue
            gain = float(tail[ranks[k]] - tail[ranks[k] + step])
            price = _price(ranks, k, sizes) * step
            if gain > floors[k] and gain / price > best:
                best, chosen = gain / price, (k, step)
        if chosen is None:
            return tuple(ranks)
        ranks[chosen[0]] += chosen[1]


def best_shape(
    n: int, features: int, max_params: int, max_rank: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Ranks, row and column factors with the least predicted error; None if no shape is small enough."""
    most = max_params if max_rank is None else max_rank
    found = []
    for p, q in _factorings(n, features):
        sizes = [x * y for x, y in zip(p, q, strict=True)]
        tails = [_model(sizes, cut, max_params)[: most + 1] for cut in range(1, len(sizes))]
        ranks = ranks_for(tails, sizes, max_params)
        if ranks is not None:
            error = math.sqrt(sum(tail[r] for tail, r in zip(tails, ranks, strict=True)))
            found.append((error, _flops(q, ranks), ranks, p, q))
    if not found:
        return None
    close = [shape for shape in found if shape[0] <= _CLOSE * min(found)[0]]
    return min(close, key=lambda shape: shape[1])[2:]


def predicted_error(sizes: Sequence[int], ranks: Sequence[int]) -> float:
    """Relative error that the model predicts for ranks, with sizes ``p_k q_k``; at most 1, that of a table of zeros."""
    lost = 0.0
    for cut, rank in enumerate(ranks, 1):
        side = min(math.prod(sizes[:cut]), math.prod(sizes[cut:]))
        kept, whole = _harmonic(np.array([min(rank, side), side])).tolist()
        lost += max(1 - kept / whole, 0.0)
    return math.sqrt(min(lost, 1.0))


def least_params(n: int, features: int) -> int:
    """Parameters of the smallest shape, with ranks 1."""
    return min(sum(x * y for x, y in zip(p, q, strict=True)) for p, q in _factorings(n, features))


def _factorings(n: int, features: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for d in range(2, 6):
        p = balanced_cover(n, d)
        if max(p) < 2**31:
            # The row factors are nearly equal: it is enough to permute the others.
            yield from (
                (p, q) for q in sorted(set(itertools.permutations(exact_factors(features, d))))
            )


def _model(sizes: Sequence[int], cut: int, max_params: int) -> np.ndarray:
    """Share of the squared norm that each rank of a cut discards if singular values decrease as ``j ** -0.5``."""
    side = min(math.prod(sizes[:cut]), math.prod(sizes[cut:]))
    affordable = max_params // (sizes[cut - 1] + sizes[cut]) + 1
    ranks = np.arange(min(side, affordable) + 1)
    return np.maximum(1 - _harmonic(ranks) / _harmonic(np.array([side])), 0.0)


def _harmonic(n: np.ndarray) -> np.ndarray:
    """``1 + 1/2 + ... + 1/n``, to 4 digits and better."""
    large = np.log(np.maximum(n, 1)) + np.euler_gamma + 1 / (2 * np.maximum(n, 1))
    return np.where(n == 0, 0.0, np.where(n == 1, 1.0, large - 1 / (12.0 * np.maximum(n, 1) ** 2)))


def _largest_step(
    ranks: Sequence[int], k: int, most: int, sizes: Sequence[int], max_params: int
) -> int:
    """By how much rank k may grow: about a sixteenth, limited by the useful maximum and the budget."""
    left = ranks[k - 1] if k else 1
    right = ranks[k + 1] if k + 1 < len(ranks) else 1
    useful = min(most, left * sizes[k], right * sizes[k + 1]) - ranks[k]
    room = (max_params - _params(ranks, sizes)) // _price(ranks, k, sizes)
    return max(0, min(1 + ranks[k] // 16, useful, room))


def _price(ranks: Sequence[int], k: int, sizes: Sequence[int]) -> int:
    """Number of parameters added by increasing rank k by one."""
    left = ranks[k - 1] if k else 1
    right = ranks[k + 1] if k + 1 < len(ranks) else 1
    return left * sizes[k] + sizes[k + 1] * right


def _params(ranks: Sequence[int], sizes: Sequence[int]) -> int:
    full = (1, *ranks, 1)
    return sum(full[k] * m * full[k + 1] for k, m in enumerate(sizes))


def _flops(q: Sequence[int], ranks: Sequence[int]) -> int:
    """Multiplications of one lookup from the left."""
    full = (1, *ranks, 1)
    return sum(math.prod(q[: k + 1]) * full[k] * full[k + 1] for k in range(1, len(q)))
