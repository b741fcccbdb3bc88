"""`tt.from_dense`: a dense table as a tensor train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_dtype, as_int, as_positive, instance_of, mismatch
from jax_tt._base.progress import Progress
from jax_tt._base.rows_of_arrays import (
    dense_table,
    exactly_one,
    number_of_sweeps,
    relative_tolerance,
    row_weights,
)
from jax_tt._tt.approximation import Approximation, measure
from jax_tt._tt.decompose import NOMINAL_RANK, tt_svd
from jax_tt._tt.least_squares import alternate, padded
from jax_tt._tt.round import check_budget, to_budget
from jax_tt._tt.rows import Rows, fill_past_end
from jax_tt._tt.shape import TTShape
from jax_tt._tt.trains import (
    FixedRanks,
    Tolerance,
    orthogonal_from_right,
    squared_tolerance,
    to_cores,
)
from jax_tt._tt.weighted import grid_equations, separable_scale

_GENEROUS = 4  # times the parameters of a budget are found first and then rounded to it
_ENERGY_BLOCK = 1 << 23  # numbers
_WEIGHTED_RIDGE = 1e-9


def tt_from_dense(
    table: Any,
    ranks: int | Sequence[int] | None = None,
    *,
    shape: TTShape | None = None,
    tolerance: float | None = None,
    max_bytes: int | None = None,
    row_factors: Sequence[int] | None = None,
    col_factors: Sequence[int] | None = None,
    weights: Any = None,
    sweeps: int = 2,
    dtype: Any = None,
    seed: int = 0,
    progress: bool = False,
) -> Approximation:
    """A tensor train close to a dense table, by TT-SVD (Oseledets 2011).

    The squared error is at most the sum, over the cuts of the train, of the discarded squared singular values of the
    table's unfolding at the cut. The error is therefore at most ``sqrt(d - 1)`` times the least possible one at these
    ranks. A table that is a tensor train of these ranks is recovered up to rounding.

    Tables of more than about a million entries are read in blocks of rows, a few times, and never copied. The memory
    required in addition to the table is that of a block, of a basis of one side, and of the products of the table with
    that basis: about 1 GB for 10,000,000 rows of 64 at rank 32. One cut is computed from its Gram matrix in float64
    (singular values below 1e-8 of the largest are lost) or, if both sides are long, by randomised subspace iteration,
    whose error is within a few per cent of that of the SVD. The other cuts are small.

    The factors usually address slightly more rows than the table has. The extra rows are filled such that they need no
    additional rank: the last, incomplete slab of rows is continued by the combination of the complete ones that fits
    it.

    Args:
        table: ``[N, D]`` of floats: a JAX array, a numpy array or memory map, or a torch tensor on the CPU without
            gradients.
        ranks: one integer or ``d - 1`` of them.
        shape: a `TTShape` of the same N and D, whose factors and ranks are used.
        tolerance: use the smallest ranks with at most this relative Frobenius error, between 0 and 1, over all rows
            that the factors address.
        max_bytes: the cores take at most this many bytes; the ranks are chosen by the singular values of the table, and
            the factors, if not given, by `TTShape.for_budget`.
        row_factors, col_factors: factors to use with ``ranks``, ``tolerance`` or ``max_bytes``; by default those of
            `TTShape.suggest`.
        weights: ``[N]``, at least 0: minimise ``sum_i weights[i] |row_i - approximation_i|^2``, e.g. with the number of
            requests of each row. There is no SVD for this unless the weights are products over the digits of a row. The
            algorithm starts with the TT-SVD of the table scaled by the closest such product, followed by ``sweeps`` of
            alternating least squares, each step of which solves the weighted normal equations of one core exactly.
            ``tolerance`` then refers to the scaled table, and may be missed if the weights are far from a product.
        sweeps: number of passes of alternating least squares over the cores, with ``weights`` only. A pass reads the
            table d times and takes about ``N r (r + D)`` multiplications per core, and for inner core k
            ``r^4 p_1 ... p_k`` more.
        dtype: storage type of the cores; by default that of the table.
        seed: of the randomised part; equal seeds give equal cores.
        progress: show a progress bar.

    Returns:
        `tt.Approximation`: cores, shape, and the error of the whole table and by quantiles of the rows. The cores are
        balanced: each singular value is divided evenly between the two adjacent cores.

    Raises:
        ValueError: not exactly one of ``ranks``, ``shape``, ``tolerance`` and ``max_bytes`` is given; the table holds
            NaN or infinity; its cores exceed the range of ``dtype``; or an argument is invalid.

    >>> import numpy as np, jax_tt
    >>> table = np.sin(np.arange(1000 * 8).reshape(1000, 8) / 100).astype(np.float32)
    >>> train = jax_tt.tt.from_dense(table, tolerance=1e-3)
    >>> train.shape.ranks, train.relative_error < 1e-3
    ((2, 2), True)
    """
    exactly_one(ranks=ranks, shape=shape, tolerance=tolerance, max_bytes=max_bytes)
    table = dense_table(table)
    n, width = table.shape
    dtype = jax.dtypes.canonicalize_dtype(as_dtype("dtype", dtype, table.dtype))
    goal = _goal(n, width, ranks, shape, max_bytes, row_factors, col_factors, dtype)
    p, q = goal.row_factors, goal.col_factors
    weights = row_weights(weights, n)
    sweeps = number_of_sweeps(sweeps)
    scale = None if weights is None else separable_scale(weights, p)
    rows = Rows(table, None if scale is None else scale.of_rows(n))
    with Progress(progress, unit="block", delay=0) as bar:
        energy = _energy(rows, bar)
        choose: FixedRanks | Tolerance = FixedRanks(goal.ranks)
        if tolerance is not None:
            choose = squared_tolerance(relative_tolerance(tolerance), energy, goal.d)
        fill_past_end(rows, goal, _noise(goal, tolerance))
        links = tt_svd(rows, p, q, choose, energy, as_int("seed", seed), bar)
        if max_bytes is not None:
            links = to_budget(
                orthogonal_from_right(links), p, q, as_positive("max_bytes", max_bytes), dtype
            )
        cores = [np.asarray(core) for core in to_cores(links, p, q)]
        if weights is not None and scale is not None:
            cores = scale.undo(cores)
            rows = Rows(table)
            equations = grid_equations(rows, weights, p, q, bar)
            cores = alternate(cores, equations, sweeps, _WEIGHTED_RIDGE * float(weights.mean()))
        if tolerance is None and max_bytes is None:
            cores = padded(cores, goal.core_shapes)
        stored = _stored(cores, dtype)
        found = tuple(core.shape[3] for core in stored[:-1])
        return measure(rows, stored, TTShape(n, width, found, p, q), weights, bar)


def _stored(cores: Sequence[np.ndarray], dtype: Any) -> tuple[jax.Array, ...]:
    largest = float(jnp.finfo(dtype).max)
    found = max(float(np.abs(core).max(initial=0)) for core in cores)
    if found > largest:
        got = (
            f"{dtype.name}, whose largest number is {largest:.3g}, for cores that hold {found:.3g}"
        )
        expected = (
            "a type of more range, e.g. bfloat16 or float32, or the table divided by a constant"
        )
        raise mismatch("dtype", got, expected)
    # Converted on the host and put on the device as they are: nothing is compiled for their shapes.
    return tuple(jax.device_put(core.astype(dtype)) for core in cores)


def _goal(
    n: int,
    width: int,
    ranks: Any,
    shape: TTShape | None,
    max_bytes: int | None,
    row_factors: Any,
    col_factors: Any,
    dtype: Any,
) -> TTShape:
    """Factors, and the ranks to find; for a tolerance they do not count."""
    if shape is not None:
        instance_of("shape", shape, TTShape, "a TTShape")
        if (shape.num_embeddings, shape.features) != (n, width):
            got = f"{shape.num_embeddings} x {shape.features}"
            raise mismatch("shape", got, f"{n} x {width}, as the table")
        if row_factors is not None or col_factors is not None:
            raise ValueError("row_factors, col_factors: the shape has them; expected None.")
        return shape
    if (row_factors is None) != (col_factors is None):
        raise ValueError("row_factors, col_factors: got one of them; expected both or neither.")
    if max_bytes is None:
        rank = NOMINAL_RANK if ranks is None else ranks
        if row_factors is not None and col_factors is not None:
            return TTShape(n, width, rank, row_factors, col_factors)
        return TTShape.suggest(n, width, rank, np.size(rank) + 1 if np.ndim(rank) else 3)
    budget = as_positive("max_bytes", max_bytes)
    if row_factors is None or col_factors is None:
        guess = TTShape.for_budget(n, width, max_bytes=budget, dtype=dtype)
        row_factors, col_factors = guess.row_factors, guess.col_factors
    rank, shape = 1, TTShape(n, width, 1, row_factors, col_factors)
    check_budget(shape.row_factors, shape.col_factors, budget, dtype)
    while True:
        wider = TTShape(n, width, 2 * rank, row_factors, col_factors)
        if wider == shape or wider.num_params * dtype.itemsize > _GENEROUS * budget:
            return wider
        rank, shape = 2 * rank, wider


def _energy(rows: Rows, progress: Progress) -> float:
    """Sum of the squares of all entries; finds NaN and infinity on the way."""
    n = rows.num_embeddings
    step = max(1, _ENERGY_BLOCK // rows.features)
    starts = range(0, n, step)
    advance, total = progress.begin("norm", len(starts)), 0.0
    for start in starts:
        block = rows.read(start, min(start + step, n))
        part = float(np.vdot(block, block))
        if not np.isfinite(part):
            bad = start + int(np.argmin(np.isfinite(np.square(block)).all(1)))
            raise mismatch(f"table: row {bad}", "NaN, infinity or a huge number", "finite numbers")
        total += part
        advance()
    return total


def _noise(goal: TTShape, tolerance: float | None) -> Any:
    """Of the squared singular values of a sample, what the first cut will discard."""
    if tolerance is None:
        return lambda s: float(np.sum(np.square(s[goal.ranks[0] :])))
    return lambda s: float(np.sum(np.square(s))) * tolerance**2 / (goal.d - 1)
