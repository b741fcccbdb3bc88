"""Trains of matrices: cores whose row and column digit are one index.

A link is an array ``[r, m, r']`` with ``m = p * q``; functions take numpy's or JAX's arrays and the module that goes
with them, ``xp``. A `Choose` decides what rank is kept at a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# (cut, singular values, descending) -> rank
Choose = Callable[[int, Any], int]

_FLOOR = 1e-2  # of the largest singular value: smaller ones are not shared evenly between two links


def to_links(cores: Sequence[Any]) -> list[Any]:
    """Cores ``[p, r, q, r']`` as links ``[r, p q, r']``."""
    return [c.transpose(1, 0, 2, 3).reshape(c.shape[1], -1, c.shape[3]) for c in cores]


def to_cores(links: Sequence[Any], row_factors: Sequence[int], col_factors: Sequence[int]) -> Any:
    """Links ``[r, p q, r']`` as cores ``[p, r, q, r']``."""
    factors = zip(links, row_factors, col_factors, strict=True)
    return tuple(
        link.reshape(link.shape[0], p, q, link.shape[2]).transpose(1, 0, 2, 3)
        for link, p, q in factors
    )


def orthogonal_from_right(links: Sequence[Any], xp: Any = np) -> list[Any]:
    """The same train with all links but the first right-orthogonal: their rows ``[r, m r']`` are orthonormal."""
    links = list(links)
    for k in range(len(links) - 1, 0, -1):
        links[k - 1 : k + 1] = shift_left(links[k - 1], links[k], xp)
    return links


def shift_left(left: Any, right: Any, xp: Any = np) -> tuple[Any, Any]:
    """Makes ``right`` right-orthogonal and multiplies what remains onto ``left``."""
    q, rest = xp.linalg.qr(right.reshape(right.shape[0], -1).T)
    return xp.tensordot(left, rest.T, 1), q.T.reshape(-1, *right.shape[1:])


def shift_right(left: Any, right: Any, xp: Any = np) -> tuple[Any, Any]:
    """Makes ``left`` left-orthogonal and multiplies what remains onto ``right``."""
    q, rest = xp.linalg.qr(left.reshape(-1, left.shape[2]))
    return q.reshape(*left.shape[:2], -1), xp.tensordot(rest, right, 1)


def truncate(links: Sequence[Any], choose: Choose, xp: Any = np) -> list[Any]:
    """A train that is orthogonal from the right, cut to the ranks that ``choose`` takes, and balanced."""
    links, spectra = list(links), []
    for k in range(len(links) - 1):
        r, m, _ = links[k].shape
        u, s, vt = xp.linalg.svd(links[k].reshape(r * m, -1), full_matrices=False)
        rank = choose(k, s)
        links[k] = u[:, :rank].reshape(r, m, rank)
        links[k + 1] = xp.tensordot(s[:rank, None] * vt[:rank], links[k + 1], 1)
        spectra.append(s[:rank])
    return balance(links, spectra, xp)


def balance(links: Sequence[Any], spectra: Sequence[Any], xp: Any = np) -> list[Any]:
    """Shares the singular values of every cut evenly between the two links that meet there, and the norm among all.

    Links come left-orthogonal, with the whole weight in the last one, from which an optimizer would start badly. Now
    entries of all links have the same mean square, as those of fresh cores. A direction whose singular value is
    (nearly) zero keeps weight on its left, so that it can still be trained.
    """
    links = list(links)
    for k, s in enumerate(spectra):
        top = xp.where(s[0] > 0, s[0], xp.ones_like(s[0]))
        share = xp.sqrt(xp.maximum(s, _FLOOR * top))
        links[k] = links[k] * share[None, None, :]
        links[k + 1] = links[k + 1] / share[:, None, None]
    sizes = xp.stack([xp.sqrt(xp.mean(xp.square(link))) for link in links])
    logs = xp.log(xp.where(xp.all(sizes > 0), sizes, xp.ones_like(sizes)))
    return [link * xp.exp(xp.mean(logs) - logs[k]) for k, link in enumerate(links)]


def left_frame(links: Sequence[np.ndarray]) -> np.ndarray:
    """Product of links from the left, ``[m_1 ... m_k, r_k]``; ``[1, 1]`` of none."""
    frame = np.ones((1, 1))
    for link in links:
        frame = np.tensordot(frame, link, 1).reshape(-1, link.shape[2])
    return frame


def right_frame(links: Sequence[np.ndarray]) -> np.ndarray:
    """Product of links to the right, ``[r_k, m_{k+1} ... m_d]``; ``[1, 1]`` of none."""
    frame = np.ones((1, 1))
    for link in reversed(links):
        frame = np.tensordot(link, frame, 1).reshape(link.shape[0], -1)
    return frame


def interleave(array: np.ndarray, axis: int, p: Sequence[int], q: Sequence[int]) -> np.ndarray:
    """Axis ``(i_1 ... i_k, j_1 ... j_k)``, as tables have it, to ``(i_1, j_1, ..., i_k, j_k)``, as trains do."""
    return _reorder(array, axis, (*p, *q), [x + y for x in range(len(p)) for y in (0, len(p))])


def separate(array: np.ndarray, axis: int, p: Sequence[int], q: Sequence[int]) -> np.ndarray:
    """The inverse of `interleave`."""
    pairs = [size for both in zip(p, q, strict=True) for size in both]
    return _reorder(array, axis, pairs, [*range(0, 2 * len(p), 2), *range(1, 2 * len(p), 2)])


def _reorder(
    array: np.ndarray, axis: int, digits: Sequence[int], order: Sequence[int]
) -> np.ndarray:
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    split = array.reshape(*before, *digits, *after)
    axes = [*range(axis), *(axis + x for x in order)]
    axes += range(axis + len(digits), split.ndim)
    return split.transpose(axes).reshape(array.shape)


class FixedRanks:
    """Keeps given ranks, or what there is."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = tuple(ranks)

    def __call__(self, cut: int, s: Any) -> int:
        return min(self.ranks[cut], s.shape[0])


class Tolerance:
    """Keeps as little as leaves a squared error of at most ``allowed`` after all cuts.

    Each cut may discard its share of what the cuts before it have left over.
    """

    def __init__(self, cuts: int, allowed: float):
        self.cuts, self.allowed = cuts, allowed
        self.lost: dict[int, float] = {}

    def __call__(self, cut: int, s: Any) -> int:
        lost = self.lost.get(cut, 0.0)
        discarded = lost + np.cumsum(np.square(s[::-1]))
        dropped = int(np.searchsorted(discarded, self.share(cut), side="right"))
        rank = max(1, s.shape[0] - dropped)
        self.allowed -= lost + float(np.sum(np.square(s[rank:])))
        return rank

    def share(self, cut: int) -> float:
        """The squared error that a cut may make, with those before it decided."""
        return self.allowed / (self.cuts - cut)

    def note_lost(self, cut: int, energy: float) -> None:
        """Says that a cut has discarded so much before its singular values were known."""
        self.lost[cut] = energy


def squared_tolerance(relative: float, energy: float, d: int) -> Tolerance:
    """`Tolerance` of ``d`` cores for an error relative to the norm ``sqrt(energy)``."""
    return Tolerance(d - 1, relative**2 * energy)


def spectra(links: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Singular values of every cut of a train that is orthogonal from the right; float64 ``[r_k]`` each."""
    found: list[np.ndarray] = []

    def note(cut: int, s: np.ndarray) -> int:
        del cut
        found.append(np.array(s))
        return s.shape[0]

    truncate(links, note)
    return found
