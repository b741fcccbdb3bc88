"""Dense-table ops on the native kernels."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._dtypes import accumulator
from jax_tt._native._call import native, native_call
from jax_tt._native._operands import (
    lookup_attributes,
    make_operands,
    update_attributes,
    weights_result,
    weights_shape,
)
from jax_tt._native.partition import Arrays, over_blocks
from jax_tt._ops._batch import Batch
from jax_tt._ops._spec import DenseSpec


def _workspace(platform: str, op: str, spec: DenseSpec, ids: jax.Array) -> int | None:
    """Bytes of working memory for one call."""
    if platform == "cpu":
        return None
    return native(platform).dense_workspace_size(
        op, spec.num_embeddings, spec.features, math.prod(ids.shape[:2])
    )


def dense_forward(
    spec: DenseSpec,
    table: jax.Array,
    batch: Batch,
    save: bool = False,
    sentinel: jax.Array | None = None,
    *,
    platform: str,
) -> tuple[jax.Array, Arrays]:
    operands = make_operands(spec, table.dtype, batch)
    sentinel = jnp.ones((), jnp.float32) if sentinel is None else sentinel
    shape = operands.out_shape(spec.features)

    def local(
        ids: jax.Array, offsets: jax.Array, weights: jax.Array, sentinel: Any, table: Any, axes: Any
    ) -> Arrays:
        out = jax.ShapeDtypeStruct((ids.shape[0], *shape[1:]), accumulator(table.dtype))
        return native_call(
            platform,
            "dense_forward",
            (out,),
            _workspace(platform, "forward", spec, ids),
            ids,
            offsets,
            weights,
            sentinel,
            table,
            **lookup_attributes(platform, spec, batch, axes),
        )

    (out,) = over_blocks(
        local,
        (operands.ids, operands.offsets, operands.weights, sentinel, table),
        (True, True, True, False, False),
        (True,),
    )
    # The update takes the forward result only to run after it: with no order between the two, XLA would copy the table.
    return out.reshape(operands.groups, operands.bags, spec.features), (out,) if save else ()


def dense_backward(
    spec: DenseSpec,
    table: jax.Array,
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    want_weights: bool,
    axis_name: Any = None,
    *,
    platform: str,
) -> tuple[jax.Array, jax.Array | None]:
    del residuals
    operands = make_operands(spec, table.dtype, batch)
    accum = accumulator(table.dtype)

    def local(*args: jax.Array, axes: Any) -> Arrays:
        table = args[-1]
        dweights, dtable = native_call(
            platform,
            "dense_backward",
            (
                jax.ShapeDtypeStruct(
                    (args[0].shape[0], weights_shape(operands, want_weights)[1]), accum
                ),
                jax.ShapeDtypeStruct(table.shape, accum),
            ),
            _workspace(platform, "backward", spec, args[0]),
            *args,
            **lookup_attributes(platform, spec, batch, axes),
        )
        return dweights, lax.psum(dtable, axes) if axes else dtable

    dweights, dtable = over_blocks(
        local,
        (
            operands.ids,
            operands.offsets,
            operands.weights,
            g.reshape(operands.out_shape(spec.features)),
            table,
        ),
        (True, True, True, True, False),
        (True, False),
    )
    dtable = lax.psum(dtable, axis_name) if axis_name else dtable
    return dtable, weights_result(batch, dweights, want_weights)


def dense_update(
    spec: DenseSpec,
    table: jax.Array,
    slots: Arrays,
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
) -> tuple[jax.Array, Arrays, jax.Array, jax.Array | None]:
    operands = make_operands(spec, table.dtype, batch)
    accum = accumulator(table.dtype)
    tables = (table, *slots)
    step = (hyper, inv_scale, seed)

    def local(out: jax.Array, *args: jax.Array, axes: Any) -> Arrays:
        batch_args, rest = args[:4], args[4:]
        axes = axis_name or axes
        blocks = batch_args[0].shape[0]
        if axes:
            # Every replica takes the step of the whole batch: ids and output gradients are far smaller than a table.
            batch_args = tuple(_gather(arg, axes) for arg in batch_args)
            out = lax.psum(out.reshape(-1)[:1], axes)  # enough to run after the forward pass
        applied, dweights, *new = native_call(
            platform,
            "dense_update",
            (
                jax.ShapeDtypeStruct((), jnp.float32),
                jax.ShapeDtypeStruct(
                    (batch_args[0].shape[0], weights_shape(operands, want_weights)[1]), accum
                ),
                *(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in rest[3:]),
            ),
            _workspace(platform, "update", spec, batch_args[0]),
            out,
            *batch_args,
            *rest,
            aliases={8 + i: 2 + i for i in range(len(tables))},
            **lookup_attributes(platform, spec, batch, axes),
            **update_attributes(kind, skip_nonfinite, stochastic),
        )
        if axes:
            dweights = lax.dynamic_slice_in_dim(dweights, lax.axis_index(axes) * blocks, blocks)
        return dweights, applied, *new

    dweights, applied, *new = over_blocks(
        local,
        (
            *residuals,
            operands.ids,
            operands.offsets,
            operands.weights,
            g.reshape(operands.out_shape(spec.features)),
            *step,
            *tables,
        ),
        (*(True,) * 5, *(False for _ in (*step, *tables))),
        (True, False, *(False for _ in tables)),
    )
    return new[0], tuple(new[1:]), applied, weights_result(batch, dweights, want_weights)


def _gather(shard: jax.Array, axes: Any) -> jax.Array:
    """All shards along the leading axis.

    A sum in which every device contributes its own shard: unlike the result of `jax.lax.all_gather`, that of a sum is
    known to be the same everywhere, which an update of a replicated table must be.
    """
    blocks = shard.shape[0]
    whole = jnp.zeros((blocks * lax.axis_size(axes), *shard.shape[1:]), shard.dtype)
    start = (lax.axis_index(axes) * blocks, *(0 for _ in shard.shape[1:]))
    return lax.psum(lax.dynamic_update_slice(whole, shard, start), axes)
