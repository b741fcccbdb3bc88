"""Least squares over all rows of a table, each with its weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._tt.least_squares import Equations, kron_sum
from jax_tt._tt.rows import Rows, blocks
from jax_tt._tt.trains import left_frame, right_frame, separate

_BLOCK = 1 << 22  # numbers in a block
_NORMAL = 1 << 26  # numbers in the normal matrices held at a time, 512 MiB
_LEAST_SCALE = 1e-2  # of the largest of a digit: rarer digits count as much as this


@dataclasses.dataclass(frozen=True)
class Scale:
    """Factors of rows that are products over their digits."""

    factors: tuple[np.ndarray, ...]  # [p_k] each

    def of_rows(self, n: int) -> np.ndarray:
        """The factors of the first ``n`` rows, ``[n]``."""
        out = np.ones(1)
        for factor in self.factors:
            out = np.multiply.outer(out, factor).reshape(-1)
        return out[:n]

    def undo(self, cores: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Turns cores of the scaled table into cores of the table."""
        pairs = zip(cores, self.factors, strict=True)
        return [core / factor[:, None, None, None] for core, factor in pairs]


def separable_scale(weights: np.ndarray, row_factors: Sequence[int]) -> Scale:
    """Roots of the product of the weights' marginals: the product form nearest to them in relative entropy."""
    total = np.zeros(math.prod(row_factors))
    total[: len(weights)] = weights
    total = total.reshape(row_factors)
    factors = []
    for k in range(len(row_factors)):
        marginal = np.sqrt(total.sum(tuple(j for j in range(len(row_factors)) if j != k)))
        factors.append(np.maximum(marginal / marginal.max(), _LEAST_SCALE))
    return Scale(tuple(factors))


def grid_equations(
    rows: Rows,
    weights: np.ndarray,
    row_factors: Sequence[int],
    col_factors: Sequence[int],
    progress: Progress,
) -> Equations:
    """Normal equations over all rows: what the rows on a grid share is multiplied once."""
    of_rows = Rows(weights[:, None])
    p, q = tuple(row_factors), tuple(col_factors)

    def equations(
        links: Sequence[np.ndarray], k: int
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        heads, tails = math.prod(p[:k]), math.prod(p[k + 1 :])
        left = separate(left_frame(links[:k]), 0, p[:k], q[:k])
        right = separate(right_frame(links[k + 1 :]), 1, p[k + 1 :], q[k + 1 :])
        r, s = left.shape[1], right.shape[0]
        left = left.reshape(heads, -1, r)  # [heads, q left, r]
        right = right.reshape(s, tails, -1).transpose(1, 2, 0)  # [tails, q right, r']
        counts = (p[k], tails)
        reach = range(-(-rows.num_embeddings // (p[k] * tails)))  # heads with rows
        for group in blocks(p[k], _NORMAL // (r * r * s * s)):
            matrix = np.zeros((r * r, len(group), s * s))
            target = np.zeros((r, len(group) * q[k], s))
            # A block is a few whole heads or, where one is too large, part of its tails.
            per_tail = len(group) * rows.features
            pieces = [
                (reach[h[0] : h[-1] + 1], t)
                for h in blocks(len(reach), _BLOCK // (tails * per_tail))
                for t in blocks(tails, _BLOCK // (len(h) * per_tail))
            ]
            step = progress.begin(f"core {k}", len(pieces))
            for h, t in pieces:
                head, tail = left[h[0] : h[-1] + 1], right[t[0] : t[-1] + 1]
                weight = of_rows.grid(h, group, t, counts)[..., 0]
                block = rows.grid(h, group, t, counts) * weight[..., None]
                head_gram = np.matmul(head.transpose(0, 2, 1), head).reshape(len(h), r * r)
                tail_gram = np.matmul(tail.transpose(0, 2, 1), tail).reshape(len(t), s * s)
                matrix += np.tensordot(head_gram.T, weight @ tail_gram, 1)
                # [h, g, t, q left, q, q right] -> [h, q left, g, q, (t, q right)]
                block = block.reshape(len(h), len(group), len(t), -1, q[k], tail.shape[1])
                block = block.transpose(0, 3, 1, 4, 2, 5).reshape(
                    head.shape[0] * head.shape[1], len(group) * q[k], -1
                )
                half = block @ tail.reshape(-1, s)
                target += np.tensordot(head.reshape(-1, r).T, half, 1)
                step()
            target = target.reshape(r, len(group), q[k], s).transpose(1, 0, 3, 2)
            for x, i in enumerate(group):
                yield i, kron_sum(matrix[:, x], r, s), target[x].reshape(r * s, q[k])

    return equations
