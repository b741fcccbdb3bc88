"""TT-SVD of a dense table on the host, from its unfolding at one cut where it is too large for an SVD."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._tt.rows import Rows, blocks
from jax_tt._tt.trains import FixedRanks, Tolerance, balance, interleave, left_frame

_EXACT = 1 << 20  # entries of a table that is decomposed as it stands
_GRAM_WORK = 4e9  # multiplications of an SVD from which that of a Gram matrix is taken

_BLOCK = 1 << 23  # numbers in a block, 64 MiB of float64
GRAM_SIDE = 1024  # rows of an unfolding up to which its Gram matrix is cheaper than sketching
_OVERSAMPLING = 10
_POWER_PASSES = 3
NOMINAL_RANK = 64  # of a cut whose rank is not known yet


class Unfolding:
    """The table as a matrix ``[m, n]``: digits of rows and columns up to the cut, and those after it.

    Rows are numbered ``(i_1, j_1, ..., i_s, j_s)`` as trains have them, columns ``(i_{s+1} ... i_d, j_{s+1} ... j_d)``.
    """

    def __init__(
        self,
        rows: Rows,
        row_factors: Sequence[int],
        col_factors: Sequence[int],
        cut: int,
        progress: Progress,
    ):
        self.rows, self.cut, self.progress = rows, cut, progress
        self.p, self.q = tuple(row_factors[:cut]), tuple(col_factors[:cut])
        self.heads, self.tails = math.prod(self.p), math.prod(row_factors[cut:])
        self.left, self.right = math.prod(self.q), math.prod(col_factors[cut:])
        self.m, self.n = self.heads * self.left, self.tails * self.right

    def blocks(self, label: str) -> Iterator[tuple[slice, np.ndarray]]:
        """Columns and the block ``[m, columns]`` of float64 that they are, one after the other."""
        pieces = blocks(self.tails, _BLOCK // (self.m * self.right))
        step = self.progress.begin(label, len(pieces))
        # A head has rows of its own only where the table reaches; all others are zero.
        reach = self.rows.num_embeddings + len(self.rows.filled)
        heads = range(min(self.heads, -(-reach // self.tails)))
        for piece in pieces:
            part = self.rows.grid(heads, range(1), piece, (1, self.tails))
            block = np.zeros((self.heads, self.left, len(piece), self.right))
            block[: len(heads)] = part.reshape(
                len(heads), len(piece), self.left, self.right
            ).transpose(0, 2, 1, 3)
            columns = slice(piece[0] * self.right, (piece[-1] + 1) * self.right)
            yield columns, interleave(block.reshape(self.m, -1), 0, self.p, self.q)
            step()


def pick_cut(
    row_factors: Sequence[int], col_factors: Sequence[int], ranks: Sequence[int] | None
) -> int:
    """The cut at which least has to be kept in memory: a basis of the left side, and its products with the right."""

    def kept(cut: int) -> int:
        rank = ranks[cut - 1] if ranks else NOMINAL_RANK
        m = math.prod(row_factors[:cut]) * math.prod(col_factors[:cut])
        n = math.prod(row_factors[cut:]) * math.prod(col_factors[cut:])
        side = m if m <= GRAM_SIDE else rank + _OVERSAMPLING
        return m * side + rank * n

    return min(range(1, len(row_factors)), key=kept)


def gram_factor(unfolding: Unfolding) -> np.ndarray:
    """``C [m, m]`` with ``C C^T = X X^T``: the table but for a rotation of its right side, which left cuts do not see.

    Sums are in float64, so that singular values below 1e-8 of the largest are lost: less than the rounding of a
    float32 table.
    """
    gram = np.zeros((unfolding.m, unfolding.m))
    for _, block in unfolding.blocks("first pass"):
        gram += block @ block.T
    values, vectors = np.linalg.eigh(gram)
    return vectors[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0.0))


def project(unfolding: Unfolding, basis: np.ndarray) -> np.ndarray:
    """``basis^T X`` for a basis ``[m, r]``, ``[r, n]``."""
    out = np.empty((basis.shape[1], unfolding.n))
    for columns, block in unfolding.blocks("projection"):
        out[:, columns] = basis.T @ block
    return out


def sketch(
    unfolding: Unfolding, choose: FixedRanks | Tolerance, total: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """An orthonormal basis ``[m, l]`` of nearly all that matters of the left side, and ``basis^T X``, ``[l, n]``.

    Subspace iteration: every pass over the table multiplies the basis by ``X X^T`` (Halko, Martinsson and Tropp 2011).
    Where the rank follows from a tolerance, the basis is doubled until what it loses is at most the share of its cut.
    """
    most = min(unfolding.m, unfolding.n)
    fixed = isinstance(choose, FixedRanks)
    size = min(most, (choose.ranks[unfolding.cut - 1] if fixed else NOMINAL_RANK) + _OVERSAMPLING)
    rng = np.random.default_rng(seed)
    while True:
        basis = np.linalg.qr(rng.standard_normal((unfolding.m, size)))[0]
        for _ in range(_POWER_PASSES):
            image = np.zeros_like(basis)
            for _, block in unfolding.blocks(f"basis of {size}"):
                image += block @ (block.T @ basis)
            basis = np.linalg.qr(image)[0]
        rest = project(unfolding, basis)
        lost = max(total - float(np.vdot(rest, rest)), 0.0)
        if fixed or size == most:
            return basis, rest
        if lost <= choose.share(0):
            choose.note_lost(unfolding.cut - 1, lost)
            return basis, rest
        size = min(most, 2 * size)


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
