"""`tt.Approximation`: cores made from a dense table, and their error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._tt.rows import Rows, blocks, frames
from jax_tt._tt.shape import TTShape

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_BLOCK = 1 << 23  # numbers in a block, 64 MiB of float64


@dataclasses.dataclass(frozen=True, eq=False)
class Approximation:
    """A dense table as a tensor train; made by `tt.from_dense`.

    Errors are those of the cores as they are stored, over all rows of the table.

    Attributes:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        shape: their `TTShape`.
        relative_error: Frobenius norm of the difference, divided by that of the table.
        weighted_error: the same with the square of every row multiplied by its weight; None without weights.
        row_errors: quantile -> relative error of a row, ``|row - approximation| / |row|``, at the quantiles 0, 0.05,
            0.25, 0.5, 0.75, 0.95, 0.99 and 1 over the rows. The error of a row of zeros is relative to the root mean
            square norm of all rows.

    >>> import numpy as np, jax_tt
    >>> train = jax_tt.tt.from_dense(np.ones((1000, 8), np.float32), 1)
    >>> train.shape.ranks, train.relative_error < 1e-6, train.row_errors[0.99] < 1e-6
    ((1, 1), True, True)
    """

    cores: tuple[jax.Array, ...]
    shape: TTShape
    relative_error: float
    weighted_error: float | None
    row_errors: dict[float, float]

    def __str__(self) -> str:
        weighted = "" if self.weighted_error is None else f" ({self.weighted_error:.3g} by weight)"
        rows = ", ".join(f"{at:g}: {error:.3g}" for at, error in self.row_errors.items())
        return f"{self.shape}\nrelative error {self.relative_error:.3g}{weighted}; of a row, by quantile: {rows}"


def measure(
    rows: Rows,
    cores: Sequence[jax.Array],
    shape: TTShape,
    weights: np.ndarray | None,
    progress: Progress,
) -> Approximation:
    """The `tt.Approximation` of cores, computed in one pass over the table."""
    squares, sizes = _squares(rows, rows_of(cores, shape, progress), shape.num_embeddings)
    weighted = None
    if weights is not None:
        weighted = _ratio(float(weights @ squares), float(weights @ sizes))
    return Approximation(tuple(cores), shape, *_relative(squares, sizes, weighted))


def errors(
    rows: Rows, approximations: Iterable[tuple[int, np.ndarray]]
) -> tuple[float, dict[float, float]]:
    """`Approximation.relative_error` and ``row_errors`` of other rows, given by blocks with their first row."""
    relative, _, row_errors = _relative(*_squares(rows, approximations, rows.num_embeddings), None)
    return relative, row_errors


def _squares(
    rows: Rows, approximations: Iterable[tuple[int, np.ndarray]], n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Squared lengths of the errors of rows, and of the rows."""
    squares, sizes = np.empty(n), np.empty(n)
    for start, approximate in approximations:
        stop = start + len(approximate)
        row = rows.read(start, stop)
        sizes[start:stop] = np.einsum("nd,nd->n", row, row)
        row -= approximate
        squares[start:stop] = np.einsum("nd,nd->n", row, row)
    return squares, sizes


def _relative(
    squares: np.ndarray, sizes: np.ndarray, weighted: float | None
) -> tuple[float, float | None, dict[float, float]]:
    relative = _ratio(float(squares.sum()), float(sizes.sum()))
    mean = float(sizes.mean()) or 1.0
    np.sqrt(np.divide(squares, np.where(sizes > 0, sizes, mean), out=squares), out=squares)
    row_errors = dict(zip(QUANTILES, np.quantile(squares, QUANTILES).tolist(), strict=True))
    return relative, weighted, row_errors


def rows_of(cores: Sequence[Any], shape: TTShape, progress: Progress) -> Any:
    """First row and rows ``[n, D]``, float64, of one block of a tensor-train table after the other."""
    left, right = frames(cores, shape)
    tails = right.shape[1]
    pieces = [
        (h, t)
        for h in blocks(-(-shape.num_embeddings // tails), _BLOCK // (tails * shape.features))
        for t in blocks(tails, _BLOCK // (len(h) * shape.features))
    ]
    step = progress.begin("error", len(pieces))
    for h, t in pieces:
        start = h[0] * tails + t[0]
        value = np.tensordot(left[h[0] : h[-1] + 1], right[:, t[0] : t[-1] + 1], 1)
        value = value.transpose(0, 2, 1, 3).reshape(-1, shape.features)
        if start < shape.num_embeddings:
            yield start, value[: shape.num_embeddings - start]
        step()


def _ratio(part: float, whole: float) -> float:
    if whole > 0:
        return math.sqrt(part / whole)
    return 0.0 if part == 0 else math.inf
