"""Alternating least squares: the best core for the others as they are, one core after the other.

Core k meets every row through what the other cores make of it: with ``L_i [q_left, r]`` and ``R_i [r', q_right]`` the
parts of row i on both sides, ``row_i[j_left, j, j_right]`` is fitted by ``L_i core[i_k, :, j, :] R_i``. The slices of
a core have nothing to do with each other, and the columns j of a slice share their normal matrix,
``A = sum_i w_i (L_i^T L_i) x (R_i R_i^T)`` over the rows whose digit is that slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jax_tt._tt.trains import (
    FixedRanks,
    orthogonal_from_right,
    shift_left,
    shift_right,
    to_cores,
    to_links,
    truncate,
)

# (links, k) -> of every slice of core k that rows meet: its number, A [r r', r r'] and B [r r', q]
Equations = Callable[[Sequence[np.ndarray], int], Iterator[tuple[int, np.ndarray, np.ndarray]]]


def alternate(
    cores: Sequence[np.ndarray], equations: Equations, sweeps: int, ridge: float
) -> list[np.ndarray]:
    """Cores after ``sweeps`` passes over all of them, there and back in turn; balanced, of the same shapes.

    The other cores are kept orthogonal, so that ``ridge |core - core before|^2`` is ridge times the squared change of
    the whole table, rows without weight included. What is minimised never grows.
    """
    p = [core.shape[0] for core in cores]
    q = [core.shape[2] for core in cores]
    shapes = [core.shape for core in cores]
    d = len(cores)
    links = orthogonal_from_right(to_links(cores))
    for sweep in range(sweeps):
        forward = sweep % 2 == 0
        for k in range(d) if forward else reversed(range(d)):
            core = to_cores([links[k]], [p[k]], [q[k]])[0].copy()
            for i, matrix, right in equations(links, k):
                core[i] = solve_slice(matrix, right, core[i], ridge)
            links[k] = to_links([core])[0]
            if forward and k + 1 < d:
                links[k : k + 2] = shift_right(links[k], links[k + 1])
            elif not forward and k > 0:
                links[k - 1 : k + 1] = shift_left(links[k - 1], links[k])
    links = truncate(orthogonal_from_right(links), FixedRanks([shape[3] for shape in shapes[:-1]]))
    return padded(to_cores(links, p, q), shapes)


def padded(cores: Sequence[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Cores with zeros up to ranks that their neighbours leave no use for."""
    return [
        np.pad(core, [(0, want - have) for have, want in zip(core.shape, shape, strict=True)])
        for core, shape in zip(cores, shapes, strict=True)
    ]


def kron_sum(grams: np.ndarray, r: int, s: int) -> np.ndarray:
    """``[r r, s s]``, a sum of outer products of Gram matrices, as the normal matrix ``[r s, r s]``."""
    return grams.reshape(r, r, s, s).transpose(0, 2, 1, 3).reshape(r * s, r * s)


def solve_slice(matrix: np.ndarray, right: np.ndarray, old: np.ndarray, ridge: float) -> np.ndarray:
    """The slice ``[r, q, r']`` that minimises its quadratic and ``ridge |slice - old|^2``."""
    r, q, s = old.shape
    flat = old.transpose(0, 2, 1).reshape(r * s, q)
    matrix[np.diag_indices(r * s)] += ridge
    new = np.linalg.solve(matrix, right + ridge * flat)
    return new.reshape(r, s, q).transpose(0, 2, 1)
