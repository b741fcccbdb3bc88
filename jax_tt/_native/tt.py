"""TT ops on the native kernels."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt import _ffi
from jax_tt._lookup._batch import Batch
from jax_tt._lookup._vma import vary_over, varying_axes
from jax_tt._native._call import Named, native, native_call, numbered, types_of
from jax_tt._native._operands import (
    Operands,
    lookup_attributes,
    make_operands,
    sentinel_operand,
    shard_of,
    step_operands,
    update_attributes,
    weights_result,
)
from jax_tt._native.partition import Arrays, is_resharded, over_blocks
from jax_tt._precision import tensor_float32
from jax_tt._tables import reference
from jax_tt._tables.options import Lookup

if TYPE_CHECKING:
    from jax_tt._tables.tensor_train import TTTable

Cores = tuple[jax.Array, ...]

# Ids per unit of the plan size of a symbolic batch; `ChunkRows` in ffi/core/plan.cc gives no chunk fewer rows.
_STRIDE = 64


@functools.cache
def _plan_sizes(platform: str, *sizes: Any) -> tuple[int, int]:
    """int32 elements of the plan of a number of ids, and elements that the forward pass saves per id.

    In a program for several platforms, residuals have the same size on all of them, so these are the maxima. Handlers
    accept a plan that is larger than needed, and ignore saved products that they do not use.
    """
    together = ("cpu", "cuda") if platform in ("cpu", "cuda") else (platform,)
    found = [module.plan_size(*sizes) for module in map(_ffi.load, together) if module is not None]
    return max(plan for plan, _ in found), max(saved for _, saved in found)


def _workspace(
    platform: str, op: str, table: TTTable, ids: jax.Array | None, **asked: bool
) -> int | None:
    """Bytes of working memory for one call; ``asked`` are the options of the op that need memory."""
    if platform == "cpu":
        return None
    count = 0 if ids is None else math.prod(ids.shape[:2])
    return native(platform).workspace_size(
        op, table.row_factors, table.col_factors, table.ranks, count, **asked
    )


def batch_attributes(
    platform: str, table: TTTable, batch: Batch, lookup: Lookup, axes: Any
) -> dict[str, Any]:
    # A shard must choose the contraction that the sizes of the whole batch assume. 0 means the number of ids in the
    # call.
    positions = math.prod(batch.ids.shape[:2])
    hint = np.int64(positions if isinstance(positions, int) else 0)
    return (
        table.native_attributes
        | lookup_attributes(platform, table, batch, lookup, axes)
        | {
            "hint": hint,
            "resharded": is_resharded(batch.ids),
            "tensor_float32": tensor_float32(lookup.precision),
        }
    )


def blocked_sizes(platform: str, operands: Operands, table: TTTable) -> tuple[int, int]:
    """Per block: elements of the plan and of the saved products."""
    sizes = table.row_factors, table.col_factors, table.ranks, table.num_embeddings
    per_block = operands.positions // operands.blocks
    if not isinstance(per_block, int):
        # Plans grow at most linearly with the number of ids, so the sum over the strides is sufficient.
        plan, _ = _plan_sizes(platform, *sizes, _STRIDE, _STRIDE)
        return (per_block // _STRIDE + 1) * plan, 0
    plan, saved = _plan_sizes(platform, *sizes, per_block, operands.positions)
    # Products are saved in float32 only; the sizes of the plan assume this.
    return plan, per_block * saved if operands.accum == jnp.float32 else 0


def _plan(
    platform: str, table: TTTable, size: int, args: Named, attributes: dict[str, Any]
) -> jax.Array:
    """Plan of one shard, ``[blocks, size]``."""
    ids = args["ids"]
    operands = {name: args[name] for name in ("ids", "offsets", "sentinel")}
    results = {"plan": jax.ShapeDtypeStruct((ids.shape[0], size), jnp.int32)}
    workspace = _workspace(platform, "plan", table, ids)
    return native_call(platform, "plan", operands, results, workspace, attributes)["plan"]


def tt_plan(
    platform: str, table: TTTable, cores: Cores, batch: Batch, out: jax.Array, lookup: Lookup
) -> Arrays:
    """Residuals for a backward pass without a native forward pass: no saved products, and the result ``out``."""
    operands = make_operands(table, cores[0].dtype, batch)
    size, _ = blocked_sizes(platform, operands, table)

    def local(args: Named, axes: Any) -> Named:
        attributes = batch_attributes(platform, table, batch, lookup, axes)
        return {"plan": _plan(platform, table, size, args, attributes)}

    blocked = {name: operands.arrays[name] for name in ("ids", "offsets")}
    plan = over_blocks(local, blocked, {"sentinel": sentinel_operand(None)}, ["plan"])["plan"]
    saved = jnp.zeros((operands.blocks, 0), operands.accum)
    return plan, saved, operands.gradient(out)["g"]


def tt_forward(
    table: TTTable,
    platform: str,
    cores: Cores,
    batch: Batch,
    lookup: Lookup,
    sentinel: jax.Array | None,
) -> tuple[jax.Array, Arrays]:
    operands = make_operands(table, cores[0].dtype, batch)
    plan_size, saved_size = blocked_sizes(platform, operands, table)
    kept = saved_size if lookup.wanted.names else 0
    named = dict(zip(table.param_names, cores, strict=True))

    def local(args: Named, axes: Any) -> Named:
        attributes = batch_attributes(platform, table, batch, lookup, axes)
        plan = _plan(platform, table, plan_size, args, attributes)
        ids = args["ids"]
        found = native_call(
            platform,
            "forward",
            {name: args[name] for name in operands.arrays}
            | {"plan": plan}
            | {name: args[name] for name in named},
            {
                "out": operands.sums_type(ids, table.features),
                "saved": jax.ShapeDtypeStruct((ids.shape[0], kept), operands.accum),
            },
            _workspace(platform, "forward", table, ids),
            attributes,
        )
        return {**found, "plan": plan}

    whole = {"sentinel": sentinel_operand(sentinel)} | named
    found = over_blocks(local, operands.arrays, whole, ["out", "plan", "saved"])
    # The forward result only orders the update after the forward pass; otherwise XLA would copy the cores.
    residuals = (found["plan"], found["saved"], found["out"]) if lookup.wanted.names else ()
    return found["out"].reshape(operands.groups, operands.bags, table.features), residuals


def _residual_operands(operands: Operands, residuals: Arrays, g: jax.Array) -> dict[str, jax.Array]:
    """The blocked operands of the backward pass."""
    plan, saved, _ = residuals
    return operands.arrays | {"plan": plan, "saved": saved} | operands.gradient(g)


def _backward(
    platform: str,
    table: TTTable,
    operands: Operands,
    batch: Batch,
    lookup: Lookup,
    args: Named,
    axes: Any,
) -> dict[str, jax.Array]:
    """``touched``, ``dweights`` and the gradients ``core_k`` of one shard; ``args`` are only the operands of the op."""
    want_weights = lookup.wanted.weights
    cores = {name: args[name] for name in table.param_shapes}
    found = native_call(
        platform,
        "backward",
        {name: array for name, array in args.items() if name not in cores}
        | {f"of_{name}": core for name, core in cores.items()},
        {
            "touched": jax.ShapeDtypeStruct((sum(table.row_factors),), jnp.int32),
            "dweights": operands.weights_type(args["ids"], want_weights),
            **types_of(cores, operands.accum),
        },
        _workspace(
            platform,
            "backward",
            table,
            args["ids"],
            weights=want_weights,
            resharded=is_resharded(batch.ids),
        ),
        batch_attributes(platform, table, batch, lookup, axes),
    )
    return found


def tt_backward(
    table: TTTable,
    platform: str,
    cores: Cores,
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    lookup: Lookup,
) -> tuple[Cores, jax.Array | None]:
    operands = make_operands(table, cores[0].dtype, batch)
    named = numbered("core", cores)

    def local(args: Named, axes: Any) -> Named:
        found = _backward(platform, table, operands, batch, lookup, args, axes)
        summed = {name: lax.psum(found[name], axes) if axes else found[name] for name in named}
        return {"dweights": found["dweights"]} | summed

    blocked = _residual_operands(operands, residuals, g)
    found = over_blocks(local, blocked, named, ["dweights"])
    dweights = weights_result(batch, found["dweights"], lookup)
    return tuple(found[name] for name in named), dweights


def tt_update(
    table: TTTable,
    platform: str,
    arrays: tuple[Cores, tuple[Arrays, ...]],
    batch: Batch,
    residuals: Arrays,
    g: jax.Array,
    lookup: Lookup,
    values: Named,
) -> tuple[Cores, tuple[Arrays, ...], jax.Array, jax.Array | None]:
    cores, slots = arrays
    assert table.update is not None
    operands = make_operands(table, cores[0].dtype, batch)
    of_batch = _residual_operands(operands, residuals, g)
    step = step_operands(values)
    named = numbered("core", cores)
    tables = named | numbered("slot", (slot for core in slots for slot in core))
    update = update_attributes(table.update, cores[0].dtype)
    applied = {"applied": jax.ShapeDtypeStruct((), jnp.float32)}
    want_weights = lookup.wanted.weights

    def summed(args: Named, axes: Any) -> Named:
        """Sums the gradients of all shards, then applies the same update on each of them."""
        shard_axes = varying_axes(*(args[name] for name in of_batch))
        own = {name: args[name] for name in of_batch}
        marked = vary_over({name: args[name] for name in named}, shard_axes)
        results = _backward(platform, table, operands, batch, lookup, {**own, **marked}, axes)
        results = vary_over(results, shard_axes)
        grads = lax.psum({name: results[name] for name in ("touched", *named)}, axes)
        # The op "apply" has no ids, and the backward pass only those of its own shard.
        refused = reference.poisoned(table, shard_of(batch, args), lookup, axes)
        scale = args["scale"].at[1].set(jnp.where(refused, 0, args["scale"][1]))
        found = native_call(
            platform,
            "apply",
            {"touched": grads["touched"]}
            | {name: args[name] for name in step}
            | {"scale": scale}
            | {f"d{name}": grads[name] for name in named}
            | {name: args[name] for name in tables},
            applied | types_of(tables),
            _workspace(platform, "apply", table, None),
            table.native_attributes | update,
        )
        found["applied"] = jnp.where(refused, 0, found["applied"])
        return {"dweights": results["dweights"], **found}

    def local(args: Named, axes: Any) -> Named:
        axes = lookup.axis_name or axes
        if axes:
            return summed(args, axes)
        return native_call(
            platform,
            "update",
            args,
            applied
            | {"dweights": operands.weights_type(args["ids"], want_weights)}
            | types_of(tables),
            _workspace(
                platform,
                "update",
                table,
                args["ids"],
                weights=want_weights,
                resharded=is_resharded(batch.ids),
                skip_nonfinite=table.update.skip_nonfinite,  # pyright: ignore[reportOptionalMemberAccess]
            ),
            batch_attributes(platform, table, batch, lookup, axes) | update,
        )

    blocked = {"out": residuals[2]} | of_batch
    found = over_blocks(local, blocked, step | tables, ["dweights"])
    rest = iter(tuple(found[name] for name in tables)[len(cores) :])
    new_slots = tuple(tuple(next(rest) for _ in core) for core in slots)
    dweights = weights_result(batch, found["dweights"], lookup)
    return tuple(found[name] for name in named), new_slots, found["applied"], dweights
