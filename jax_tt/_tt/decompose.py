"""TT-SVD of a dense table on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from jax_tt._tt.rows import Rows
from jax_tt._tt.trains import FixedRanks, Tolerance, balance, interleave, left_frame
from jax_tt._tt.unfolding import (
    GRAM_SIDE,
    Progress,
    Unfolding,
    gram_factor,
    pick_cut,
    project,
    sketch,
)

_EXACT = 1 << 20  # entries of a table that is decomposed as it stands
_GRAM_WORK = 4e9  # multiplications of an SVD from which that of a Gram matrix is taken


def tt_svd(
    rows: Rows,
    row_factors: Sequence[int],
    col_factors: Sequence[int],
    choose: FixedRanks | Tolerance,
    total: float,
    seed: int,
    progress: Progress,
) -> list[np.ndarray]:
    """Links ``[r, p q, r']`` of the table, balanced, in float64.

    Args:
        rows: the table, filled past its end.
        row_factors, col_factors: ``p`` and ``q``.
        choose: the rank of each cut.
        total: sum of the squares of all entries, used with a tolerance only.
        seed: of the sketch of a large table.
        progress: told of passes over the table.
    """
    sizes = [p * q for p, q in zip(row_factors, col_factors, strict=True)]
    if math.prod(sizes) <= _EXACT:
        whole = rows.read(0, math.prod(row_factors)).reshape(1, -1)
        links, spectra, rest = sweep(
            interleave(whole, 1, row_factors, col_factors), sizes, 0, choose
        )
        return balance([*links, rest[:, :, None]], spectra)
    ranks = choose.ranks if isinstance(choose, FixedRanks) else None
    cut = pick_cut(row_factors, col_factors, ranks)
    unfolding = Unfolding(rows, row_factors, col_factors, cut, progress)
    basis = rest = None
    if unfolding.m <= GRAM_SIDE:
        factor = gram_factor(unfolding)
    else:
        basis, rest = sketch(unfolding, choose, total, seed)
        values, vectors = np.linalg.eigh(rest @ rest.T)
        factor = basis @ (vectors * np.sqrt(np.maximum(values, 0.0)))
    # Cuts up to this one see the table through its factor, with one more mode for the right side.
    links, spectra, _ = sweep(factor.reshape(1, -1), [*sizes[:cut], factor.shape[1]], 0, choose)
    frame = left_frame(links)
    reread = basis is None or rest is None
    right = project(unfolding, frame) if reread else (frame.T @ basis) @ rest
    right = interleave(right, 1, row_factors[cut:], col_factors[cut:])
    more, more_spectra, rest = sweep(right, sizes[cut:], cut, choose)
    return balance([*links, *more, rest[:, :, None]], [*spectra, *more_spectra])


def sweep(
    tensor: np.ndarray, sizes: Sequence[int], first: int, choose: FixedRanks | Tolerance
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """TT-SVD of ``[r, m_1 ... m_k]`` from the left.

    Returns:
        ``k - 1`` left-orthogonal links, the singular values kept at each cut, and what remains for the last mode,
        ``[r_{k-1}, m_k]``.
    """
    links, spectra = [], []
    rest = tensor
    for k, size in enumerate(sizes[:-1]):
        r = rest.shape[0]
        u, s, rest = truncated_svd(rest.reshape(r * size, -1), first + k, choose)
        links.append(u.reshape(r, size, -1))
        spectra.append(s)
    return links, spectra, rest


def truncated_svd(
    matrix: np.ndarray, cut: int, choose: FixedRanks | Tolerance
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``u [m, r]`` with orthonormal columns, the singular values kept, and ``u^T matrix``."""
    m, n = matrix.shape
    if m * n * min(m, n) <= _GRAM_WORK:
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        rank = choose(cut, s)
        return u[:, :rank], s[:rank], s[:rank, None] * vt[:rank]
    wide = m <= n
    values, vectors = np.linalg.eigh(matrix @ matrix.T if wide else matrix.T @ matrix)
    s = np.sqrt(np.maximum(values[::-1], 0.0))
    rank = choose(cut, s)
    vectors = vectors[:, ::-1][:, :rank]
    u = vectors if wide else np.linalg.qr(matrix @ vectors)[0]
    return u, s[:rank], u.T @ matrix
