"""Pooled sums that read hits from cached rows and only misses from the cores."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax

from jax_tt._cache.keys import divide
from jax_tt._dtypes import accumulator
from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch
from jax_tt._ops._dispatch import (
    Wanted,
    instantiate,
    perturbed,
    pooled_sum,
    values,
    weights_gradient,
)
from jax_tt._ops._explicit import pooled_over_explicit_axes
from jax_tt._ops._fused_call import call_fused, prepare
from jax_tt._ops._fused_sum import Fused, check_whole, stepped
from jax_tt._ops._spec import TTSpec
from jax_tt._ops._table import FusedTable
from jax_tt._ops._vma import sum_gradients, vary_over, varying_axes
from jax_tt.optimizers import Optimizer


def trained_rows_sum(
    spec: TTSpec,
    table: Any,
    rows: Any,
    batch: Batch,
    slots: jax.Array,
    optimizer: Optimizer | None,
    **options: Any,
) -> jax.Array:
    """Sums ``[S, nb, D]`` whose gradient goes to the cached rows for hits and to the cores for misses.

    Args:
        spec: the table.
        table: cores, or a `FusedTable` of them.
        rows: ``[slots, D]``, or a `FusedTable` of them.
        batch: ids of the table.
        slots: int32 ``[S, cap]``, slot of every position, -1 where it is not cached.
        optimizer: rule of the fused tables, or None.
        options: of `pooled_sum`, or of `call_fused`.
    """
    values: Any = rows.cores[0] if isinstance(rows, FusedTable) else rows
    hits, misses = divide(spec, batch, slots, values.shape[0])
    if optimizer is None:
        hit_sum = pooled_sum(hits[0], (values,), hits[1], **options)
        miss_sum = pooled_sum(misses[0], table, misses[1], **options)
    else:
        hit_sum = call_fused(hits[0], rows, hits[1], optimizer, **options)
        miss_sum = call_fused(misses[0], table, misses[1], optimizer, **options)
    return _added(miss_sum, hit_sum)


def copied_rows_sum(
    spec: TTSpec,
    table: Any,
    rows: jax.Array,
    batch: Batch,
    slots: jax.Array,
    optimizer: Optimizer | None,
    **options: Any,
) -> jax.Array:
    """Sums ``[S, nb, D]`` that read hits from copies; the whole gradient goes to the cores.

    Args: as `trained_rows_sum`; ``rows`` are an array.
    """
    rows = jax.lax.stop_gradient(rows)
    if optimizer is None:
        method, axis_name = options["method"], options["axis_name"]
        method = _backend.choose(method, table[0].dtype)
        axes = varying_axes(table, batch)
        if axes:
            table, rows, batch = vary_over((table, rows, batch), axes)
        elif axis_name is not None:
            table = sum_gradients(table, axis_name)
        fused, arrays = None, {}
    else:
        fused, arrays, batch = prepare(spec, table, batch, optimizer, **options)
        method = fused.method
        rows = vary_over(rows, varying_axes(batch))
    call = Copied(spec, method, fused)

    def pooled(inputs: Any) -> jax.Array:
        table, rows, slots, batch, arrays = inputs
        weights, batch = batch.weights, dataclasses.replace(batch, weights=None)
        return _copied_sum(call, table, weights, (rows, slots, batch, arrays))

    return pooled_over_explicit_axes(pooled, (table, rows, slots, batch, arrays), batch)


@dataclasses.dataclass(frozen=True)
class Copied:
    """Static part of a call that reads copies; ``fused`` where its backward pass steps the table."""

    spec: TTSpec
    method: str
    fused: Fused | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copied_sum(call: Copied, table: Any, weights: Any, rest: Any) -> jax.Array:
    rows, slots, batch, _ = rest
    batch = dataclasses.replace(batch, weights=weights)
    cores = table.cores if isinstance(table, FusedTable) else table
    sentinel = table.sentinel if isinstance(table, FusedTable) else None
    hits, misses = divide(call.spec, batch, slots, rows.shape[0])
    hit_sum, _ = _backend.forward(hits[0], (rows,), hits[1], call.method, False)
    miss_sum, _ = _backend.forward(misses[0], cores, misses[1], call.method, False, sentinel)
    return _added(miss_sum, hit_sum)


def _fwd(call: Copied, table: Any, weights: Any, rest: Any) -> tuple[Any, Any]:
    wanted = Wanted(perturbed(table), perturbed(weights))
    if wanted.cores and call.fused is not None:
        check_whole(call.fused, table)
    table, weights, rest = values((table, weights, rest))
    out = _copied_sum(call, table, weights, rest)
    _, _, batch, arrays = rest
    batch = dataclasses.replace(batch, weights=weights)
    return out, (table, batch, out, arrays, wanted)


def _bwd(call: Copied, saved: Any, g: Any) -> tuple[Any, Any, None]:
    table, batch, out, arrays, wanted = saved
    cores = table.cores if isinstance(table, FusedTable) else table
    g = instantiate(g).astype(accumulator(cores[0].dtype))  # the sum may be wider, as the rows are
    if not wanted.cores:
        if not wanted.weights:
            return None, None, None
        return None, weights_gradient(call.spec, cores, batch, g, call.method), None
    residuals = _backend.plan(call.spec, cores, batch, out, call.method)
    if call.fused is None:
        grads, dweights = _backend.backward(
            call.spec, cores, batch, residuals, g, call.method, wanted.weights
        )
        grads = tuple(grad.astype(core.dtype) for grad, core in zip(grads, cores, strict=True))
        return grads, dweights, None
    new, dweights = stepped(call.fused, table, batch, residuals, arrays, g, wanted)
    return new, dweights, None


_copied_sum.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _added(left: jax.Array, right: jax.Array) -> jax.Array:
    wide = accumulator(left.dtype, right.dtype)  # float64 cores beside narrower rows
    return left.astype(wide) + right.astype(wide)
