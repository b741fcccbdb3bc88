"""Dense-table ops on the native kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._lookup._batch import Batch
from jax_tt._native._call import Named, native, native_call, numbered, types_of
from jax_tt._native._operands import (
    lookup_attributes,
    make_operands,
    sentinel_operand,
    step_operands,
    update_attributes,
    weights_result,
)
from jax_tt._native.partition import Arrays, over_blocks
from jax_tt._tables.options import Lookup

if TYPE_CHECKING:
    from jax_tt._tables.dense import DenseTable


def _workspace(platform: str, op: str, table: DenseTable, ids: jax.Array) -> int | None:
    """Bytes of working memory for one call."""
    if platform == "cpu":
        return None
    return native(platform).dense_workspace_size(
        op, table.num_embeddings, table.features, math.prod(ids.shape[:2])
    )


def dense_forward(
    table: DenseTable,
    platform: str,
    params: Arrays,
    batch: Batch,
    lookup: Lookup,
    sentinel: jax.Array | None,
) -> tuple[jax.Array, Arrays]:
    (rows,) = params
    operands = make_operands(table, rows.dtype, batch)

    def local(args: Named, axes: Any) -> Named:
        return native_call(
            platform,
            "dense_forward",
            args,
            {"out": operands.sums_type(args["ids"], table.features)},
            _workspace(platform, "forward", table, args["ids"]),
            lookup_attributes(platform, table, batch, lookup, axes),
        )

    whole = {"sentinel": sentinel_operand(sentinel), "rows": rows}
    out = over_blocks(local, operands.arrays, whole, ["out"])["out"]
    sums = out.reshape(operands.groups, operands.bags, table.features)
    # The forward result only orders the update after the forward pass; otherwise XLA would copy the table.
    return sums, (out,) if lookup.wanted.names else ()


def dense_backward(
    table: DenseTable,
    platform: str,
    params: Arrays,
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    lookup: Lookup,
) -> tuple[Arrays, jax.Array | None]:
    del residuals
    (rows,) = params
    operands = make_operands(table, rows.dtype, batch)

    def local(args: Named, axes: Any) -> Named:
        found = native_call(
            platform,
            "dense_backward",
            args,
            {
                "dweights": operands.weights_type(args["ids"], lookup.wanted.weights),
                "drows": jax.ShapeDtypeStruct(rows.shape, operands.accum),
            },
            _workspace(platform, "backward", table, args["ids"]),
            lookup_attributes(platform, table, batch, lookup, axes),
        )
        return {**found, "drows": lax.psum(found["drows"], axes)} if axes else found

    blocked = operands.arrays | operands.gradient(g)
    found = over_blocks(local, blocked, {"rows": rows}, ["dweights"])
    return (found["drows"],), weights_result(batch, found["dweights"], lookup)


def dense_update(
    table: DenseTable,
    platform: str,
    arrays: tuple[Arrays, tuple[Arrays, ...]],
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    lookup: Lookup,
    values: Named,
) -> tuple[Arrays, tuple[Arrays, ...], jax.Array, jax.Array | None]:
    ((rows,), (slots,)), (out,) = arrays, residuals
    assert table.update is not None
    operands = make_operands(table, rows.dtype, batch)
    blocked = {"out": out} | operands.arrays | operands.gradient(g)
    named = numbered("table", (rows, *slots))
    update = update_attributes(table.update, rows.dtype)

    def local(args: Named, axes: Any) -> Named:
        axes = lookup.axis_name or axes
        blocks = args["ids"].shape[0]
        if axes:
            # Every replica applies the update of the whole batch: ids and output gradients are smaller than a table.
            gathered = {name: _gather(args[name], axes) for name in blocked if name != "out"}
            first = lax.psum(args["out"].reshape(-1)[:1], axes)  # to run after the forward pass
            args = {**args, **gathered, "out": first}
        found = native_call(
            platform,
            "dense_update",
            args,
            {
                "applied": jax.ShapeDtypeStruct((), jnp.float32),
                "dweights": operands.weights_type(args["ids"], lookup.wanted.weights),
                **types_of(named),
            },
            _workspace(platform, "update", table, args["ids"]),
            lookup_attributes(platform, table, batch, lookup, axes) | update,
        )
        if axes:
            start = lax.axis_index(axes) * blocks
            found["dweights"] = lax.dynamic_slice_in_dim(found["dweights"], start, blocks)
        return found

    found = over_blocks(local, blocked, step_operands(values) | named, ["dweights"])
    dweights = weights_result(batch, found["dweights"], lookup)
    rows, *new_slots = (found[name] for name in named)
    return (rows,), (tuple(new_slots),), found["applied"], dweights


def _gather(shard: jax.Array, axes: Any) -> jax.Array:
    """All shards along the leading axis.

    Computed as a psum: JAX knows its result to be replicated, unlike that of `jax.lax.all_gather`, and the update of a
    replicated table must be replicated.
    """
    blocks = shard.shape[0]
    whole = jnp.zeros((blocks * lax.axis_size(axes), *shard.shape[1:]), shard.dtype)
    start = lax.axis_index(axes) * blocks
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, shard, start, 0), axes)
