"""Tensor trains for a number of bytes: one, with or without an order of ids, products of low rank, and sums."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from jax_tt._compress.candidate import Candidate, Found
from jax_tt._compress.residuals import residual_table, tt_residuals
from jax_tt._compress.source import Made, Source
from jax_tt._ids.id_order import OrderedRows
from jax_tt._ids.stored_order import kept_bytes
from jax_tt._ops.trains import tt_to_table
from jax_tt._tt.budget import least_params
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.residual_shapes import least_residual_bytes, tt_residual_shapes
from jax_tt._tt.shape import TTShape
from jax_tt.order._table import from_table

# Fits that show which kinds are worth a better one.
_QUICK = {"sweeps": 0}
_QUICK_ORDER = {"refine": 0, "sweeps": 0}
_QUICK_SUM = {"refine": 0}
# Rounds of an order's refinement.
_REFINE = 4


def low_rank(source: Source, max_bytes: int) -> Found:
    of_rank = least_low_rank(source)
    rank = min(max_bytes // of_rank, source.sizes[1])
    if rank:
        make = functools.partial(_of_rank, rank=int(rank))
        yield Candidate("low_rank", f"rank {rank}", rank * of_rank, make, _QUICK)


def one_train(source: Source, max_bytes: int) -> Found:
    if _shape(source, max_bytes) is None:
        return
    make = functools.partial(_fitted, max_bytes=max_bytes)
    yield Candidate("tt", f"up to {max_bytes:,} bytes", max_bytes, make, _QUICK)
    if _shape(source, max_bytes - kept_bytes(source.sizes[0])) is not None:
        make = functools.partial(_ordered, max_bytes=max_bytes)
        yield Candidate(
            "tt", f"ids ordered, up to {max_bytes:,} bytes", max_bytes, make, _QUICK_ORDER
        )


def sum_of_trains(source: Source, max_bytes: int) -> Found:
    try:
        shapes = tt_residual_shapes(*source.sizes, max_bytes, dtype=source.param_dtype)
    except ValueError:  # no sum is so small
        return
    make = functools.partial(_sum, max_bytes=max_bytes)
    terms = "1 train" if len(shapes) == 1 else f"{len(shapes)} trains"
    yield Candidate("tt_sum", f"{terms}, up to {max_bytes:,} bytes", max_bytes, make, _QUICK_SUM)


def least_low_rank(source: Source) -> int:
    """The fewest bytes of `low_rank`, as of the other two below."""
    return jnp.dtype(source.param_dtype).itemsize * sum(source.sizes)


def least_train(source: Source) -> int:
    return jnp.dtype(source.param_dtype).itemsize * least_params(*source.sizes)


def least_sum(source: Source) -> int:
    return least_residual_bytes(*source.sizes, jnp.dtype(source.param_dtype))


def _shape(source: Source, max_bytes: int) -> TTShape | None:
    """The largest shape within so many bytes, if there is one."""
    if max_bytes < 1:
        return None
    try:
        return _largest(source, max_bytes)
    except ValueError:
        return None


def _largest(source: Source, max_bytes: int) -> TTShape:
    return TTShape.for_budget(*source.sizes, max_bytes=max_bytes, dtype=source.param_dtype)


def _of_rank(source: Source, rank: int, **options: Any) -> Made:
    """A tensor train of two cores, of which one has a row for every id and the other all columns."""
    n, features = source.sizes
    options |= {"row_factors": (n, 1), "col_factors": (1, features)}
    return tt_to_table(_train(source, source.rows, source.weights, ranks=rank, **options))


def _fitted(source: Source, max_bytes: int, **options: Any) -> Made:
    options |= {"max_bytes": source.share(max_bytes)}
    return tt_to_table(_train(source, source.rows, source.weights, **options))


def _ordered(source: Source, max_bytes: int, refine: int = _REFINE, **options: Any) -> Made:
    shape = _largest(source, source.share(max_bytes) - kept_bytes(source.sizes[0]))
    order = from_table(source.rows, shape, refine=refine, seed=source.seed, progress=False)
    weights = None if source.weights is None else source.weights[order.inverse.rows]
    train = _train(source, OrderedRows(source.rows, order), weights, shape=shape, **options)
    return tt_to_table(train, order)


def _sum(source: Source, max_bytes: int, refine: int = _REFINE) -> Made:
    size = source.share(max_bytes)
    terms = tt_residuals(
        source.rows,
        tt_residual_shapes(*source.sizes, size, dtype=source.param_dtype),
        refine=refine,
        dtype=source.param_dtype,
        seed=source.seed,
        progress=False,
    )
    return residual_table(terms)


def _train(source: Source, rows: Any, weights: Any, **options: Any) -> Any:
    options |= {"weights": weights, "dtype": source.param_dtype, "seed": source.seed}
    return tt_from_dense(rows, **options)
