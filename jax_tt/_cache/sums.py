"""Pooled sums that read hits from cached rows and only misses from the cores."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._cache import backend
from jax_tt._cache.keys import divide
from jax_tt._dtypes import accumulator
from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch, present
from jax_tt._ops._dispatch import (
    Wanted,
    instantiate,
    perturbed,
    pooled_sum,
    values,
    weights_gradient,
)
from jax_tt._ops._explicit import pooled_over_explicit_axes
from jax_tt._ops._fused_call import prepare
from jax_tt._ops._fused_sum import Fused, check_whole, stepped
from jax_tt._ops._reverse_only import first_order, reverse_only
from jax_tt._ops._spec import TTSpec
from jax_tt._ops._table import FusedTable
from jax_tt._ops._vma import sum_gradients, vary_over, varying_axes
from jax_tt._ops._warn import warn_out_of_range
from jax_tt.optimizers import Optimizer


def cached_sum(
    spec: TTSpec,
    table: Any,
    rows: Any,
    batch: Batch,
    slots: jax.Array,
    optimizer: Optimizer | None,
    trained: bool,
    **options: Any,
) -> jax.Array:
    """Sums ``[S, nb, D]`` of cached rows for hits and rows of the table for misses.

    Args:
        spec: the table.
        table: cores, or a `FusedTable` of them.
        rows: ``[slots, D]``, or a `FusedTable` of them where they are trained by the fused optimizer.
        batch: ids of the table.
        slots: int32 ``[S, cap]``, slot of every position, -1 where it is not cached.
        optimizer: rule of the fused tables, or None.
        trained: the gradient of a hit goes to its row. Otherwise rows are copies, and the whole gradient goes to the
            cores.
        options: of `pooled_sum`, or of `call_fused`.
    """
    rows = rows if isinstance(rows, FusedTable) else (rows,)
    (cached,), _ = _opened(rows)
    cores, _ = _opened(table)
    method = _backend.choose(options["method"], accumulator(cached.dtype, cores[0].dtype))
    if method == "reference" and spec.bounds == "warn":
        warn_out_of_range(
            spec, batch
        )  # of the batch as it was given: once, whatever it is divided into
        spec = dataclasses.replace(spec, bounds="zero")
    (hit_spec, hits), (miss_spec, misses) = divide(spec, batch, slots, cached.shape[0])
    if optimizer is None and method == "reference" and trained:
        # Plain JAX, which can be differentiated to any order.
        parts = ((miss_spec, table, misses), (hit_spec, rows, hits))
        return backend.added(*(pooled_sum(*part, **options) for part in parts))
    core_spec = miss_spec if trained else spec
    fused, fused_rows, arrays, row_arrays = None, None, {}, {}
    if optimizer is not None:
        fused, arrays, _ = prepare(core_spec, table, batch, optimizer, **options)
        if trained:
            fused_rows, row_arrays, _ = prepare(hit_spec, rows, hits, optimizer, **options)
        axes = varying_axes(batch, hits, misses)
        batch, hits, misses = vary_over((batch, hits, misses), axes)
        if not trained:
            rows = vary_over(rows, axes)
    elif axes := varying_axes(table, rows, batch, hits, misses):
        table, rows, batch, hits, misses = vary_over((table, rows, batch, hits, misses), axes)
    elif options["axis_name"] is not None:
        table, rows = sum_gradients((table, rows), options["axis_name"])
    if not trained:
        rows = jax.lax.stop_gradient(rows)
    call = _Call(
        _Part(core_spec, method, fused), _Part(hit_spec, method, fused_rows), miss_spec, trained
    )

    def pooled(inputs: Any) -> jax.Array:
        *operands, rest = inputs
        return _cached_sum(call, *reverse_only(operands), rest)

    plain = (dataclasses.replace(part, weights=None) for part in (batch, hits, misses))
    rest = (*plain, arrays, row_arrays)
    return pooled_over_explicit_axes(pooled, (table, rows, batch.weights, rest), batch)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Static part of the lookups whose gradient goes to one table; ``fused`` where the backward pass steps it."""

    spec: Any
    method: str
    fused: Fused | None


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static part of a call."""

    cores: _Part
    rows: _Part
    misses: TTSpec
    trained: bool


class _Saved(NamedTuple):
    """What the backward pass takes."""

    table: Any
    rows: Any
    weights: Any
    rest: Any
    forward: backend.Forward
    wanted: Wanted
    wanted_rows: Wanted


def _opened(table: Any) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Cores of a table, and its sentinel if it is a `FusedTable`."""
    return (table.cores, table.sentinel) if isinstance(table, FusedTable) else (table, None)


def _forward(
    call: _Call, table: Any, rows: Any, weights: Any, rest: Any, save: bool
) -> backend.Forward:
    _, hits, misses, *_ = rest
    cores, of_cores = _opened(table)
    (cached,), of_rows = _opened(rows)
    hits, misses = (dataclasses.replace(part, weights=weights) for part in (hits, misses))
    return backend.forward(
        (call.rows.spec, hits),
        (call.misses, misses),
        cached,
        cores,
        call.cores.method,
        save,
        (of_cores, of_rows),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cached_sum(call: _Call, table: Any, rows: Any, weights: Any, rest: Any) -> jax.Array:
    return _forward(call, table, rows, weights, rest, save=False).sums


def _fwd(call: _Call, table: Any, rows: Any, weights: Any, rest: Any) -> tuple[Any, Any]:
    wanted = Wanted(perturbed(table), perturbed(weights))
    wanted_rows = Wanted(call.trained and perturbed(rows), wanted.weights)
    for part, own, asked in ((call.cores, table, wanted), (call.rows, rows, wanted_rows)):
        if part.fused is not None and asked.cores:
            check_whole(part.fused, own)
    table, rows, weights, rest = values((table, rows, weights, rest))
    save = call.trained and (wanted.cores or wanted_rows.cores)
    run = partial(_forward, call, save=save)
    forward = first_order(run, table, rows, weights, rest)
    return forward.sums, _Saved(table, rows, weights, rest, forward, wanted, wanted_rows)


def _bwd(call: _Call, saved: _Saved, g: Any) -> tuple[Any, Any, Any, None]:
    return first_order(partial(_all_cotangents, call), saved, instantiate(g))


def _all_cotangents(call: _Call, saved: _Saved, g: jax.Array) -> tuple[Any, Any, Any, None]:
    batch, hits, misses, arrays, row_arrays = saved.rest
    forward, wanted = saved.forward, saved.wanted
    if not call.trained:
        batch = dataclasses.replace(batch, weights=saved.weights)
        residuals = ()
        if wanted.cores:
            cores, _ = _opened(saved.table)
            plan = _backend.plan
            residuals = plan(call.cores.spec, cores, batch, forward.sums, call.cores.method)
        table, dweights = _cotangents(call.cores, saved.table, batch, residuals, arrays, g, wanted)
        return table, None, dweights, None
    of_hits, of_misses = forward.residuals
    hits = dataclasses.replace(hits, weights=saved.weights)
    table, of_packed = _cotangents(
        call.cores, saved.table, forward.misses, of_misses, arrays, g, wanted
    )
    rows, dweights = _cotangents(
        call.rows, saved.rows, hits, of_hits, row_arrays, g, saved.wanted_rows
    )
    if of_packed is not None and dweights is not None and forward.place is not None:
        of_missed = jnp.take_along_axis(of_packed, forward.place, axis=1)
        dweights = backend.added(dweights, jnp.where(present(misses), of_missed, 0))
        dweights = dweights.astype(saved.weights.dtype)
    return table, rows, dweights, None


_cached_sum.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _cotangents(
    part: _Part,
    table: Any,
    batch: Batch,
    residuals: Any,
    arrays: dict[str, jax.Array],
    g: jax.Array,
    wanted: Wanted,
) -> tuple[Any, jax.Array | None]:
    """Cotangents of a table and of the weights of the lookups in it; that of a fused table is the new one."""
    cores, _ = _opened(table)
    accum = accumulator(cores[0].dtype)
    g = g.astype(accum)  # the sum may be wider, as the other table may be
    if batch.weights is not None:
        batch = dataclasses.replace(batch, weights=batch.weights.astype(accum))
    if not wanted.cores:
        if not wanted.weights:
            return None, None
        return None, weights_gradient(part.spec, cores, batch, g, part.method)
    if part.fused is not None:
        return stepped(part.fused, table, batch, residuals, arrays, g, wanted)
    grads, dweights = _backend.backward(
        part.spec, cores, batch, residuals, g, part.method, wanted.weights
    )
    return tuple(d.astype(core.dtype) for d, core in zip(grads, cores, strict=True)), dweights
