"""`tt.grow`: more rows for a tensor-train table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, expect_ids, instance_of, mismatch
from jax_tt._tt.cores import TrainSizes, checked_cores
from jax_tt._tt.initial_cores import CoreInit, init_slices
from jax_tt._tt.least_squares import solve_slice
from jax_tt._tt.rows import blocks
from jax_tt._tt.shape import TTShape

_RIDGE = 1e-9  # of the largest entry of the normal matrix
_BLOCK = 1 << 18  # numbers computed at a time, 2 MiB of float64


def tt_grow(
    cores: Sequence[Any],
    shape: TTShape,
    key: jax.Array,
    *,
    init: CoreInit = "approx-normal",
    like: Any = None,
) -> tuple[jax.Array, ...]:
    """Cores of a table with more rows. The slices of existing rows do not change.

    Slices are appended to the first core, and nothing else changes, although a lookup may multiply in another order
    afterwards, and round differently. Unused rows of the factors become rows of the table; they share slices with their
    neighbours, so their values cannot be chosen.

    Args:
        cores: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]``.
        shape: the new `TTShape`, e.g. ``old_shape.grow(num_embeddings)``, with a larger first row factor and no other
            difference.
        key: typed key for the appended slices.
        init: as in `tt.init`: a name, with which entries of new rows have the variance ``1 / (3 N)`` of a fresh
            table, or a callable, which creates the appended slices.
        like: ints, one row or one for every new row: the new rows start close to these rows. The appended slices are
            fitted to them by least squares, in float64 on the host, some rows at a time. New rows that are unused rows
            of the factors are excluded.

    Returns:
        ``d`` cores; all but the first are the same arrays.

    Raises:
        ValueError: ``shape`` differs in more than a larger first row factor, or a row of ``like`` is not one of
            ``cores``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape(1000, 8, 4, (10, 10, 10), (2, 2, 2))
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> grown = jax_tt.tt.grow(cores, shape.grow(1200), jax.random.key(1))
    >>> [core.shape[0] for core in grown], bool((grown[0][:10] == cores[0]).all())
    ([12, 10, 10], True)
    """
    table, arrays = checked_cores(cores, name="cores")
    _check(arrays, shape)
    count = shape.row_factors[0] - table.row_factors[0]
    if not count:
        return arrays
    fresh = init_slices(key, arrays, shape, init)
    if like is not None:
        rows = _rows_like(like, shape, table.num_embeddings)
        fresh = _near(table, arrays, fresh, rows) if len(rows) else fresh
    return (jnp.concatenate([arrays[0], fresh]), *arrays[1:])


def _check(cores: Sequence[jax.Array], shape: Any) -> None:
    instance_of("shape", shape, TTShape, "a TTShape, e.g. old_shape.grow(num_embeddings)")
    have = [core.shape for core in cores]
    want = list(shape.core_shapes)
    fits = len(have) == len(want) and have[1:] == want[1:] and have[0][1:] == want[0][1:]
    if not fits or have[0][0] > want[0][0]:
        expected = f"those of the table, {have}, with at most more slices of the first"
        fix = "Use old_shape.grow(num_embeddings); tt.reorder brings a table under other factors."
        raise mismatch("shape", f"cores of shapes {want}", expected, fix)


def _rows_like(like: Any, shape: TTShape, old_rows: int) -> np.ndarray:
    """The row that each row of the appended slices is to be near, ``[N - old_rows]``."""
    rows = np.asarray(as_array("like", like))
    count = max(shape.num_embeddings - old_rows, 0)  # a shape may have slices to spare
    if rows.dtype.kind not in "iu" or rows.ndim > 1 or (rows.ndim and len(rows) < count):
        expected = f"an integer, or one for every new row, of which {count} are on appended slices"
        raise mismatch("like", rows, expected)
    expect_ids("like", rows.reshape(-1), old_rows, "the rows that there are")
    return np.broadcast_to(rows, count) if rows.ndim == 0 else rows[len(rows) - count :]


def _near(
    table: TrainSizes, cores: Sequence[jax.Array], fresh: jax.Array, like: np.ndarray
) -> jax.Array:
    """The appended slices that bring the last rows of the table nearest to the rows ``like``.

    A row of slice i is ``slice_i[a, r] tail[r, c]``, so that ``A = sum tail tail^T`` and ``B = sum tail wanted^T`` over
    its rows are all that a slice is solved from.
    """
    first, *rest = (np.asarray(core) for core in cores)
    tails = math.prod(table.row_factors[1:])
    rank = rest[0].shape[1]
    # Of a row: its tail, the slice of the first core that the row which it is to be near has, and that row.
    each = rank * (table.col_factors[0] + math.prod(table.col_factors[1:])) + table.features
    near = np.asarray(fresh).astype(np.float64)
    for i in range(-(-len(like) // tails)):
        rows = like[i * tails : (i + 1) * tails]
        matrix, right = np.zeros((rank, rank)), np.zeros((rank, near.shape[2]))
        for block in blocks(len(rows), _BLOCK // each):
            some = np.asarray(block)
            tail = _tails(rest, some)
            heads, of_like = np.divmod(rows[some], tails)
            wanted = first[heads, 0].astype(np.float64) @ _tails(rest, of_like)
            matrix += np.tensordot(tail, tail, ((0, 2), (0, 2)))
            right += np.tensordot(tail, wanted, ((0, 2), (0, 2)))
        near[i] = solve_slice(matrix, right, near[i], _RIDGE * float(matrix.max()) or 1.0)
    return jnp.asarray(near, fresh.dtype)


def _tails(cores: Sequence[np.ndarray], numbers: np.ndarray) -> np.ndarray:
    """What all cores but the first make of rows, float64 ``[n, r, q_2 ... q_d]``."""
    digits = np.unravel_index(numbers, [core.shape[0] for core in cores])
    tails = np.ones((len(numbers), 1, 1))
    for core, digit in zip(reversed(cores), reversed(digits), strict=True):
        slices = core[digit].astype(np.float64)
        n, rank, columns, inner = slices.shape
        tails = np.matmul(slices.reshape(n, rank * columns, inner), tails).reshape(n, rank, -1)
    return tails
