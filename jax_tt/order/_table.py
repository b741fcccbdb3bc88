"""`from_table`: an order from the rows of a trained table."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from jax_tt._base.arguments import as_int, as_positive, mismatch
from jax_tt._base.host_table import host_table
from jax_tt._base.progress import Progress
from jax_tt._base.rows_of_arrays import row_blocks
from jax_tt._ids.id_order import IdOrder, order_of_rows
from jax_tt._ops.trains import tt_to_dense
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.shape import TTShape
from jax_tt.order._partition import as_shape, partition, rounds

_CHUNK = 1 << 20  # rows per read


def from_table(
    table: Any,
    shape: TTShape,
    *,
    rank: int = 64,
    refine: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> IdOrder:
    """An order in which ids with similar rows share leading digits, to compress a trained table.

    The rows are divided into ``p_1`` equal parts, each of these into ``p_2``, and so on, always along the longest
    direction of a part.

    Args:
        table: floats ``[N, D]``, e.g. a numpy memmap, which is read in chunks, or a torch tensor on the CPU.
        shape: `TTShape` of the table.
        rank: wider tables are first projected to this many random directions.
        refine: number of rounds in which the tensor train of ``shape``, with its ranks, is fitted to the rows, and the
            ids of every prefix exchange places to be closer to it. The error of `tt.from_dense` decreases, most at low
            ranks. A round takes the time of a `tt.from_dense` and of an assignment of ``p_d`` ids for every prefix; two
            copies of the table are held in memory.
        seed: of the projection.
        progress: show a progress bar if it takes longer than a second.

    Returns:
        `IdOrder`.

    Raises:
        TypeError: ``refine``, ``rank`` or ``seed`` is not an integer.
        ValueError: ``table`` is not ``[num_embeddings, D]`` or not finite; with ``refine``, D is not that of ``shape``.

    Example:
        >>> import jax_tt, numpy as np
        >>> table = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
        >>> shape = jax_tt.TTShape(100, 8, 4, (10, 10), (2, 4))
        >>> order = jax_tt.order.from_table(table, shape)
        >>> ordered = table[order.inverse.rows]  # row by row, what the compressed table approximates
    """
    shape, rank = as_shape(shape), as_positive("rank", rank)
    rows = host_table("table", table)
    if rows.ndim != 2 or rows.shape[0] != shape.num_embeddings or not rows.shape[1]:
        raise mismatch("table", rows, f"[{shape.num_embeddings}, D], the rows of `shape`")
    refine = as_int("refine", refine, 0)
    if refine and rows.shape[1] != shape.features:
        got = f"{rows.shape[1]} columns"
        raise mismatch("table", got, f"{shape.features}, those of `shape`, to refine its order")
    steps = rounds(len(rows), shape.row_factors) + refine
    with Progress(progress, "order.from_table", steps) as bar:
        order = partition(_points(rows, rank, seed), shape.row_factors, bar)
        if refine:
            whole = _scaled(np.array(rows, np.float32))
            order = _refined(whole, order, shape, refine, bar)
    return order_of_rows(order)


def _points(table: Any, rank: int, seed: int) -> np.ndarray:
    """Points float32 ``[N, min(D, rank)]`` whose distances are approximately those of the rows."""
    count, width = table.shape
    turn = None
    if width > rank:
        turn = np.random.default_rng(seed).standard_normal((width, rank), np.float32)
        turn /= np.float32(np.sqrt(rank))
    points = np.empty((count, min(width, rank)), np.float32)
    for start, part in row_blocks(table, _CHUNK * width):
        if not np.isfinite(part).all():
            bad = start + int(np.argmin(np.isfinite(part).all(axis=1)))
            raise mismatch(f"table: row {bad}", "NaN or infinity", "finite floats")
        points[start : start + len(part)] = part if turn is None else part @ turn
    return _scaled(points)


def _scaled(points: np.ndarray) -> np.ndarray:
    """Divides by the largest entry to keep squares in range; the order does not depend on the scale."""
    points /= max(points.max(), -points.min()) or np.float32(1)
    return points


def _refined(
    points: np.ndarray, order: np.ndarray, shape: TTShape, rounds: int, progress: Progress
) -> np.ndarray:
    """The order ``[n]`` of points float32 ``[n, k]`` after rounds of fitting and assigning.

    The rows of one prefix are a fixed pattern of ``p_d`` points, transformed by the cores of the prefix. A round fits
    the cores to the points in their current order, and then assigns the ids of every prefix to the rows of its pattern
    at the least sum of squared distances (an assignment problem, solved exactly). The second step never increases the
    error, and the first step increases it at most by the suboptimality of TT-SVD.
    """
    order, count, size = order.copy(), len(points), shape.row_factors[-1]
    for _ in range(rounds):
        cores = tt_from_dense(points[order], shape=shape).cores
        rows = np.asarray(tt_to_dense(cores, count))
        for start in range(0, count, size):
            ids, places = order[start : start + size], rows[start : start + size]
            distance = 0.5 * np.square(places).sum(axis=1) - points[ids] @ places.T
            which, place = scipy.optimize.linear_sum_assignment(distance)
            order[start + place] = ids[which]
        progress.step()
    return order
