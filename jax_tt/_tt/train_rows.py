"""Rows of a tensor-train table on the host, computed when they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tt._tt.rows import blocks
from jax_tt._tt.shape import TTShape
from jax_tt._tt.trains import left_frame, right_frame, separate, to_links

_BLOCK = 1 << 21  # numbers gathered at a time, 16 MiB of float64


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
        for piece in blocks(len(rows), _BLOCK // each):
            at = slice(piece[0], piece[-1] + 1)
            value = np.matmul(self._left[heads[at]], self._right[tails[at]])
            out[at] = value.reshape(len(piece), -1)
        return out
