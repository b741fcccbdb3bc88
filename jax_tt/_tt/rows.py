"""Rows of tables on the host, in float64: of dense ones by blocks, of tensor trains as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_tt._tt.shape import TTShape
from jax_tt._tt.trains import left_frame, right_frame, separate, to_links

_BLOCK = 1 << 23  # numbers in a block, 64 MiB of float64
_SAMPLE = 1024  # columns of the unfolding that the fill is fitted on
_ROUNDING = 1e-8  # of the largest singular value
_GATHERED = 1 << 21  # numbers gathered at a time, 16 MiB of float64


class Rows:
    """The rows that row factors ``p`` address; rows past the end of the table are filled or zero.

    Blocks are grids of rows: a row's number is ``(head, middle, tail)`` in mixed radix, and a block takes a range of
    each.

    Args:
        table: ``[N, D]``, anything that is sliced by rows; a memory map is read only where necessary.
        scale: factor of every row, ``[N]`` or None.
    """

    def __init__(self, table: Any, scale: np.ndarray | None = None):
        self.table, self.scale = table, scale
        self.num_embeddings, self.features = table.shape
        self.filled = np.zeros((0, self.features))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop``, float64 ``[stop - start, D]``."""
        out = np.zeros((stop - start, self.features))
        n = self.num_embeddings
        inside = max(min(stop, n) - start, 0)
        if inside:
            out[:inside] = np.asarray(self.table[start : start + inside])
            if self.scale is not None:
                out[:inside] *= self.scale[start : start + inside, None]
        first, last = max(start, n), min(stop, n + len(self.filled))
        if first < last:
            out[first - start : last - start] = self.filled[first - n : last - n]
        return out

    def grid(
        self, heads: range, middles: range, tails: range, counts: tuple[int, int]
    ) -> np.ndarray:
        """Rows of a grid, ``[heads, middles, tails, D]``; ``counts`` are those of all middles and of all tails."""
        shape = (len(heads), len(middles), len(tails), self.features)
        parts = [
            self.read(start, start + size) for start, size in runs(heads, middles, tails, counts)
        ]
        return np.concatenate(parts).reshape(shape) if len(parts) > 1 else parts[0].reshape(shape)


def runs(
    heads: range, middles: range, tails: range, counts: tuple[int, int]
) -> list[tuple[int, int]]:
    """First row and length of the runs of consecutive rows that a grid consists of."""
    per_middle, per_tail = counts[0] * counts[1], counts[1]
    start = heads[0] * per_middle + middles[0] * per_tail + tails[0]
    if len(tails) < per_tail:
        return [
            (h * per_middle + m * per_tail + tails[0], len(tails)) for h in heads for m in middles
        ]
    if len(middles) < counts[0]:
        return [(h * per_middle + middles[0] * per_tail, len(middles) * per_tail) for h in heads]
    return [(start, len(heads) * per_middle)]


def blocks(size: int, length: int) -> list[range]:
    """``range(size)`` in pieces of at most ``length``, at least 1."""
    length = max(1, length)
    return [range(at, min(at + length, size)) for at in range(0, size, length)]


def fill_past_end(rows: Rows, goal: TTShape, noise: Callable[[np.ndarray], float]) -> None:
    """Fills the rows past the end of the table, in place, such that they need almost no rank.

    Zeros would cut a corner out of the table, which increases its rank. With the rows of one first digit as a *slab*,
    only the last slab is incomplete. It is regressed on the same rows of the complete slabs, with the ridge that makes
    the fit the expected value under noise, and the same combination of the complete slabs is put where the table has
    ended: a table of given ranks goes on with the same ranks. Slabs without any row stay zero, which is free. Where the
    complete slabs are too few to have the rank of the first cut, slabs are those of the first two digits, and so on.

    Args:
        rows: the table, changed.
        goal: factors and ranks.
        noise: the part of the energy of singular values ``[n]`` that is noise.
    """
    n, d = rows.num_embeddings, goal.d
    depth = next(k for k in range(1, d + 1) if k == d or _spans(goal, k))
    per_slab = math.prod(goal.row_factors[depth:])
    complete, known = divmod(n, per_slab)
    if known == 0:
        return
    left, right = math.prod(goal.col_factors[:depth]), math.prod(goal.col_factors[depth:])

    def unfold(tails: np.ndarray | range, slabs: range) -> np.ndarray:
        """``[slabs left, tails right]``"""
        if isinstance(tails, range):
            part = np.stack(
                [rows.read(h * per_slab + tails[0], h * per_slab + tails[-1] + 1) for h in slabs]
            )
        else:
            at = np.array([[h * per_slab + t for t in tails] for h in slabs])
            part = np.stack([np.concatenate([rows.read(i, i + 1) for i in row]) for row in at])
        part = part.reshape(len(slabs), -1, left, right).transpose(0, 2, 1, 3)
        return part.reshape(len(slabs) * left, -1)

    sample = np.unique(np.linspace(0, known - 1, -(-_SAMPLE // right)).astype(np.int64))
    others, last = unfold(sample, range(complete)), unfold(sample, range(complete, complete + 1))
    u, s, vt = np.linalg.svd(others, full_matrices=False)
    ridge = noise(s) / others.shape[1] + (s[0] * _ROUNDING) ** 2
    shrunk = np.divide(s, s**2 + ridge, out=np.zeros_like(s), where=s > 0)
    combination = ((last @ vt.T) * shrunk) @ u.T  # [left, complete left]
    filled = np.empty((per_slab - known, left * right))
    for piece in blocks(per_slab - known, _BLOCK // (complete * left * right)):
        tails = range(known + piece[0], known + piece[-1] + 1)
        value = (combination @ unfold(tails, range(complete))).reshape(left, -1, right)
        filled[piece[0] : piece[-1] + 1] = value.transpose(1, 0, 2).reshape(-1, left * right)
    rows.filled = filled


def _spans(goal: TTShape, cut: int) -> bool:
    """Whether there are enough complete slabs to have the rank of a cut, or three quarters of all."""
    complete = goal.num_embeddings // math.prod(goal.row_factors[cut:])
    enough = 4 * complete >= 3 * math.prod(goal.row_factors[:cut])
    return enough or complete * math.prod(goal.col_factors[:cut]) >= goal.ranks[cut - 1]


def frames(cores: Sequence[Any], shape: TTShape) -> tuple[np.ndarray, np.ndarray]:
    """``left [heads, q left, r]`` and ``right [r, tails, q right]``, float64, whose products are the rows.

    Row ``head * tails + tail`` is ``left[head] @ right[:, tail]``. The cut between them is where they are smallest.
    """
    p, q, ranks = shape.row_factors, shape.col_factors, shape.ranks
    links = to_links([np.asarray(core).astype(np.float64) for core in cores])

    def kept(cut: int) -> int:
        left = math.prod(p[:cut]) * math.prod(q[:cut])
        return ranks[cut - 1] * (left + math.prod(p[cut:]) * math.prod(q[cut:]))

    cut = min(range(1, shape.d), key=kept)
    heads, tails = math.prod(p[:cut]), math.prod(p[cut:])
    left = separate(left_frame(links[:cut]), 0, p[:cut], q[:cut])
    right = separate(right_frame(links[cut:]), 1, p[cut:], q[cut:])
    return left.reshape(heads, -1, left.shape[1]), right.reshape(len(right), tails, -1)


class TrainRows:
    """A tensor-train table that can be indexed by rows like an array ``[N, D]``, without materializing it.

    Args:
        cores: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]``.
        shape: their `TTShape`.
    """

    def __init__(self, cores: Sequence[Any], shape: TTShape):
        self.shape, self.dtype = (shape.num_embeddings, shape.features), cores[0].dtype
        self._left, right = frames(cores, shape)
        self._right = np.ascontiguousarray(right.transpose(1, 0, 2))  # [tails, r, q right]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """float64 ``[n, D]`` of the rows ``[n]``."""
        heads, tails = np.divmod(rows, len(self._right))
        out = np.empty((len(rows), self.shape[1]))
        each = math.prod(self._left.shape[1:]) + math.prod(self._right.shape[1:])
        for piece in blocks(len(rows), _GATHERED // each):
            at = slice(piece[0], piece[-1] + 1)
            value = np.matmul(self._left[heads[at]], self._right[tails[at]])
            out[at] = value.reshape(len(piece), -1)
        return out
