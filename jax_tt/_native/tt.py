"""TT ops on the native kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt import _ffi
from jax_tt._dtypes import accumulator
from jax_tt._native._call import native, native_call
from jax_tt._native._operands import (
    Operands,
    lookup_attributes,
    make_operands,
    update_attributes,
    weights_result,
)
from jax_tt._native.partition import Arrays, is_partitioned, num_blocks, over_blocks
from jax_tt._ops._batch import Batch
from jax_tt._ops._spec import TTSpec
from jax_tt._ops._vma import vary_over, varying_axes
from jax_tt._precision import tensor_float32

Cores = tuple[jax.Array, ...]

# Ids that the plan of a symbolic batch is sized by; `ChunkRows` in ffi/core/plan.cc gives no chunk fewer rows.
_STRIDE = 64


@functools.cache
def _sizes(platform: str, spec: TTSpec, positions: int, hint: int) -> tuple[int, int]:
    """int32 elements of the plan of ``positions`` ids, and elements that the forward pass saves per id.

    One program may hold the op for several platforms, and what it passes on to the backward pass then has one size:
    the larger. A handler takes a plan with room to spare, and leaves saved products that it has no use for alone.
    """
    together = ("cpu", "cuda") if platform in ("cpu", "cuda") else (platform,)
    sizes = [
        module.plan_size(
            spec.row_factors, spec.col_factors, spec.ranks, spec.num_embeddings, positions, hint
        )
        for module in map(_ffi.load, together)
        if module is not None
    ]
    return max(plan for plan, _ in sizes), max(saved for _, saved in sizes)


def _workspace(
    platform: str, op: str, spec: TTSpec, ids: jax.Array | None, **asked: bool
) -> int | None:
    """Bytes of working memory for one call; ``asked`` are those of its options that cost some."""
    if platform == "cpu":
        return None
    count = 0 if ids is None else math.prod(ids.shape[:2])
    return native(platform).workspace_size(
        op, spec.row_factors, spec.col_factors, spec.ranks, count, **asked
    )


def _resharded(batch: Batch) -> bool:
    """Whether a plan that travelled through a partitioned program may come back in other parts than it left in."""
    return is_partitioned(num_blocks(batch.ids.shape[0]), batch.ids)


def _table_attributes(spec: TTSpec) -> dict[str, Any]:
    return {
        "row_factors": np.asarray(spec.row_factors, np.int64),
        "col_factors": np.asarray(spec.col_factors, np.int64),
        "ranks": np.asarray(spec.ranks, np.int64),
        "num_embeddings": np.int64(spec.num_embeddings),
    }


def batch_attributes(platform: str, spec: TTSpec, batch: Batch, axes: Any) -> dict[str, Any]:
    # A shard of the batch must choose the contraction that the whole batch was sized for. 0 stands for the number of
    # ids in the call.
    positions = math.prod(batch.ids.shape[:2])
    hint = np.int64(positions if isinstance(positions, int) else 0)
    lookups = lookup_attributes(platform, spec, batch, axes)
    return (
        _table_attributes(spec)
        | lookups
        | {
            "hint": hint,
            "resharded": _resharded(batch),
            "tensor_float32": tensor_float32(spec.precision),
        }
    )


def blocked_sizes(platform: str, operands: Operands, spec: TTSpec, cores: Cores) -> tuple[int, int]:
    """Per block: elements of the plan and of the saved products."""
    per_block = operands.positions // operands.blocks
    if not isinstance(per_block, int):
        # Plans grow with the number of ids and not faster, so that those of the strides are enough together.
        plan, _ = _sizes(platform, spec, _STRIDE, _STRIDE)
        return (per_block // _STRIDE + 1) * plan, 0
    plan, saved = _sizes(platform, spec, per_block, operands.positions)
    # Products are kept for the 4-byte arithmetic only; the sizes of the plan assume it.
    return plan, per_block * saved if accumulator(cores[0].dtype) == jnp.float32 else 0


def _plan(
    platform: str,
    spec: TTSpec,
    size: int,
    ids: jax.Array,
    offsets: jax.Array,
    sentinel: jax.Array,
    attributes: dict[str, Any],
) -> jax.Array:
    """Plan of one shard, ``[blocks, size]``."""
    (plan,) = native_call(
        platform,
        "plan",
        (jax.ShapeDtypeStruct((ids.shape[0], size), jnp.int32),),
        _workspace(platform, "plan", spec, ids),
        ids,
        offsets,
        sentinel,
        **attributes,
    )
    return plan


def tt_plan(spec: TTSpec, cores: Cores, batch: Batch, out: jax.Array, *, platform: str) -> Arrays:
    """Residuals for a backward pass without a forward pass: nothing saved, and the result that stood in for it."""
    operands = make_operands(spec, cores[0].dtype, batch)
    size, _ = blocked_sizes(platform, operands, spec, cores)
    sentinel = jnp.ones((), jnp.float32)

    def local(ids: jax.Array, offsets: jax.Array, sentinel: Any, axes: Any) -> Arrays:
        attributes = batch_attributes(platform, spec, batch, axes)
        return (_plan(platform, spec, size, ids, offsets, sentinel, attributes),)

    (plan,) = over_blocks(
        local, (operands.ids, operands.offsets, sentinel), (True, True, False), (True,)
    )
    saved = jnp.zeros((operands.blocks, 0), accumulator(cores[0].dtype))
    return plan, saved, out.reshape(operands.out_shape(spec.features))


def tt_forward(
    spec: TTSpec,
    cores: Cores,
    batch: Batch,
    save: bool = False,
    sentinel: jax.Array | None = None,
    *,
    platform: str,
) -> tuple[jax.Array, Arrays]:
    operands = make_operands(spec, cores[0].dtype, batch)
    accum = accumulator(cores[0].dtype)
    plan_size, saved_size = blocked_sizes(platform, operands, spec, cores)
    kept = saved_size if save else 0
    sentinel = jnp.ones((), jnp.float32) if sentinel is None else sentinel

    def local(
        ids: jax.Array,
        offsets: jax.Array,
        weights: jax.Array,
        sentinel: Any,
        *cores: Any,
        axes: Any,
    ) -> Arrays:
        attributes = batch_attributes(platform, spec, batch, axes)
        blocks = ids.shape[0]
        plan = _plan(platform, spec, plan_size, ids, offsets, sentinel, attributes)
        out, saved = native_call(
            platform,
            "forward",
            (
                jax.ShapeDtypeStruct((blocks, *operands.out_shape(spec.features)[1:]), accum),
                jax.ShapeDtypeStruct((blocks, kept), accum),
            ),
            _workspace(platform, "forward", spec, ids),
            ids,
            offsets,
            weights,
            plan,
            *cores,
            **attributes,
        )
        return out, plan, saved

    out, plan, saved = over_blocks(
        local,
        (operands.ids, operands.offsets, operands.weights, sentinel, *cores),
        (True, True, True, False, *(False for _ in cores)),
        (True, True, True),
    )
    # The update takes the forward result only to run after it: with no order between the two, XLA would copy the cores.
    residuals = (plan, saved, out) if save else ()
    return out.reshape(operands.groups, operands.bags, spec.features), residuals


def _backward(
    platform: str,
    spec: TTSpec,
    batch: Batch,
    want_weights: bool,
    accum: Any,
    axes: Any,
    *args: jax.Array,
) -> tuple[jax.Array, jax.Array, Cores]:
    """touched, weight gradient and core gradients of one shard; args as in `_residual_args`, then cores."""
    blocks, per_block = args[0].shape[:2]
    cores = args[_BATCH_ARGS:]
    touched, dweights, *dcores = native_call(
        platform,
        "backward",
        (
            jax.ShapeDtypeStruct((sum(spec.row_factors),), jnp.int32),
            jax.ShapeDtypeStruct((blocks, per_block if want_weights else 0), accum),
            *(jax.ShapeDtypeStruct(core.shape, accum) for core in cores),
        ),
        _workspace(
            platform,
            "backward",
            spec,
            args[0],
            weights=want_weights,
            resharded=_resharded(batch),
        ),
        *args,
        **batch_attributes(platform, spec, batch, axes),
    )
    return touched, dweights, tuple(dcores)


# ids, offsets, weights, plan, saved products, output gradient: all of them in blocks.
_BATCH_ARGS = 6


def _residual_args(spec: TTSpec, operands: Operands, residuals: Arrays, g: jax.Array) -> Arrays:
    plan, saved, _ = residuals
    g = g.reshape(operands.out_shape(spec.features))
    return operands.ids, operands.offsets, operands.weights, plan, saved, g


def tt_backward(
    spec: TTSpec,
    cores: Cores,
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    want_weights: bool,
    axis_name: Any = None,
    *,
    platform: str,
) -> tuple[Cores, jax.Array | None]:
    operands = make_operands(spec, cores[0].dtype, batch)
    accum = accumulator(cores[0].dtype)

    def local(*args: jax.Array, axes: Any) -> Arrays:
        _, dweights, dcores = _backward(platform, spec, batch, want_weights, accum, axes, *args)
        return dweights, *_sum_over(dcores, axes)

    dweights, *dcores = over_blocks(
        local,
        (*_residual_args(spec, operands, residuals, g), *cores),
        (*(True,) * _BATCH_ARGS, *(False for _ in cores)),
        (True, *(False for _ in cores)),
    )
    return _sum_over(tuple(dcores), axis_name), weights_result(batch, dweights, want_weights)


def tt_update(
    spec: TTSpec,
    cores: Cores,
    slots: tuple[Arrays, ...],
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    *,
    platform: str,
    kind: int,
    hyper: jax.Array,
    inv_scale: jax.Array,
    seed: jax.Array,
    skip_nonfinite: bool,
    stochastic: bool,
    want_weights: bool,
    axis_name: Any = None,
) -> tuple[Cores, tuple[Arrays, ...], jax.Array, jax.Array | None]:
    operands = make_operands(spec, cores[0].dtype, batch)
    accum = accumulator(cores[0].dtype)
    tables = (*cores, *(slot for core in slots for slot in core))
    num_tables = len(tables)
    step = (hyper, inv_scale, seed)
    attributes = update_attributes(kind, skip_nonfinite, stochastic)
    applied_type = jax.ShapeDtypeStruct((), jnp.float32)

    def local(out: jax.Array, *args: jax.Array, axes: Any) -> Arrays:
        batch_args, step, tables = (
            args[:_BATCH_ARGS],
            args[_BATCH_ARGS:-num_tables],
            args[-num_tables:],
        )
        cores = tables[: spec.d]
        types = tuple(jax.ShapeDtypeStruct(table.shape, table.dtype) for table in tables)
        axes = axis_name or axes
        if axes:
            # Summed over the shards before the one step that all of them take.
            shard_axes = varying_axes(*batch_args)
            results = _backward(
                platform,
                spec,
                batch,
                want_weights,
                accum,
                axes,
                *batch_args,
                *vary_over(cores, shard_axes),
            )
            touched, dweights, dcores = vary_over(results, shard_axes)
            touched, dcores = _sum_over((touched, dcores), axes)
            first = 1 + len(step) + spec.d
            applied, *new = native_call(
                platform,
                "apply",
                (applied_type, *types),
                _workspace(platform, "apply", spec, None),
                touched,
                *step,
                *dcores,
                *tables,
                aliases={first + i: 1 + i for i in range(num_tables)},
                **_table_attributes(spec),
                **attributes,
            )
            return dweights, applied, *new
        blocks, per_block = batch_args[0].shape[:2]
        first = 1 + len(batch_args) + len(step)
        applied, dweights, *new = native_call(
            platform,
            "update",
            (
                applied_type,
                jax.ShapeDtypeStruct((blocks, per_block if want_weights else 0), accum),
                *types,
            ),
            _workspace(
                platform,
                "update",
                spec,
                batch_args[0],
                weights=want_weights,
                resharded=_resharded(batch),
                skip_nonfinite=skip_nonfinite,
            ),
            out,
            *batch_args,
            *step,
            *tables,
            aliases={first + i: 2 + i for i in range(num_tables)},
            **batch_attributes(platform, spec, batch, axes),
            **attributes,
        )
        return dweights, applied, *new

    dweights, applied, *new = over_blocks(
        local,
        (residuals[2], *_residual_args(spec, operands, residuals, g), *step, *tables),
        (*(True,) * (1 + _BATCH_ARGS), *(False for _ in (*step, *tables))),
        (True, False, *(False for _ in tables)),
    )
    rest = iter(new[spec.d :])
    new_slots = tuple(tuple(next(rest) for _ in core) for core in slots)
    return tuple(new[: spec.d]), new_slots, applied, weights_result(batch, dweights, want_weights)


def _sum_over(tree: Any, axes: Any) -> Any:
    return lax.psum(tree, axes) if axes else tree
