"""TT ops on the native kernels."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base import ffi
from jax_tt._base.dtypes import tensor_float32
from jax_tt._ids.batch import Batch
from jax_tt._jax import backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.call import (
    Named,
    flatten_tables,
    native,
    native_call,
    types_in,
    types_of,
    unflatten_tables,
)
from jax_tt._native.operands import (
    Operands,
    lookup_attributes,
    make_operands,
    sentinel_operand,
    shard_of,
)
from jax_tt._native.partition import Arrays, Split, is_resharded, over_blocks
from jax_tt._native.table_call import (
    BackwardPass,
    Calls,
    ForwardPass,
    GradientPass,
    TableCall,
    Types,
    UpdatePass,
)
from jax_tt._native.table_group import NativeTable, zeros_like
from jax_tt._table import reference
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.groups import Call
from jax_tt._table.options import Lookup
from jax_tt._table.state import Params
from jax_tt._tt.cores import TrainSizes

# Ids per unit of the plan size of a symbolic batch; `ChunkRows` in ffi/core/plan.cc gives no chunk fewer rows.
_STRIDE = 64


@functools.cache
def _plan_sizes(platform: str, *sizes: Any) -> tuple[int, int]:
    """int32 elements of the plan of a number of ids, and elements that the forward pass saves per id.

    In a program for several platforms, residuals have the same size on all of them, so these are the maxima. Handlers
    accept a plan that is larger than needed, and ignore saved products that they do not use.
    """
    platforms = ("cpu", "cuda") if platform in ("cpu", "cuda") else (platform,)
    pairs = [module.plan_size(*sizes) for module in map(ffi.load, platforms) if module is not None]
    return max(plan for plan, _ in pairs), max(saved for _, saved in pairs)


@functools.cache
def _workspace(platform: str, op: str, sizes: TrainSizes, count: Any, **asked: bool) -> int | None:
    """Bytes of working memory for a call with ``count`` ids; ``asked`` are the options of the op that need memory."""
    if platform == "cpu":
        return None
    return native(platform).workspace_size(
        op, sizes.row_factors, sizes.col_factors, sizes.ranks, count, **asked
    )


def _workspace_of_all(platform: str, of_each: Sequence[int | None]) -> int | None:
    """Bytes of working memory for an op on tables that need as many bytes each."""
    return None if platform == "cpu" else native(platform).tables_workspace_size(of_each)


def contraction_attributes(batch: Batch, lookup: Lookup) -> dict[str, Any]:
    # A shard must choose the contraction that the sizes of the whole batch assume. 0 means the number of ids in the
    # call.
    positions = math.prod(batch.ids.shape[:2])
    hint = np.int64(positions if isinstance(positions, int) else 0)
    return {
        "hint": hint,
        "resharded": jax.device_count() > 1 and is_resharded(batch.ids),
        "tensor_float32": tensor_float32(lookup.precision),
    }


def attributes_with_shape(
    platform: str, table: TrainTable, batch: Batch, lookup: Lookup, axes: Any
) -> dict[str, Any]:
    """The attributes of an op on one table, which does not read its shape off the cores."""
    of_batch = lookup_attributes(platform, table, batch, lookup, axes)
    of_call = contraction_attributes(batch, lookup) | {"caller": lookup.caller}
    return table.sizes.attributes | of_batch | of_call


def blocked_sizes(platform: str, operands: Operands, train: TrainSizes) -> tuple[int, int]:
    """Per block: elements of the plan and of the saved products."""
    sizes = train.row_factors, train.col_factors, train.ranks, train.num_embeddings
    per_block = operands.positions // operands.blocks
    if not isinstance(per_block, int):
        # Plans grow at most linearly with the number of ids, so the sum over the strides is sufficient.
        plan, _ = _plan_sizes(platform, *sizes, _STRIDE, _STRIDE)
        return (per_block // _STRIDE + 1) * plan, 0
    plan, saved = _plan_sizes(platform, *sizes, per_block, operands.positions)
    # Products are saved in float32 only; the sizes of the plan assume this.
    return plan, per_block * saved if operands.accum == jnp.float32 else 0


def _planned(
    platform: str, table: TrainTable, cores: Params, batch: Batch, out: jax.Array, lookup: Lookup
) -> Arrays:
    """Residuals for a backward pass without a native forward pass: no saved products, and the result ``out``."""
    operands = make_operands(table, cores[0].dtype, batch)
    size, _ = blocked_sizes(platform, operands, table.sizes)
    types = types_in(batch)

    def local(args: Named, split: Split) -> Named:
        ids = args["ids"]
        return native_call(
            platform,
            "plan",
            {name: args[name] for name in ("ids", "offsets", "sentinel")},
            {"plan": jax.ShapeDtypeStruct((ids.shape[0], size), jnp.int32)},
            _workspace(platform, "plan", table.sizes, math.prod(ids.shape[:2])),
            attributes_with_shape(platform, table, types, lookup, split.axes),
        )

    blocked = {name: operands.arrays[name] for name in ("ids", "offsets")}
    plan = over_blocks(local, blocked, {"sentinel": sentinel_operand(None)}, ["plan"])["plan"]
    saved = jnp.zeros((operands.blocks, 0), operands.accum)
    return plan, saved, operands.gradient(out)["g"]


class TTCall(TableCall):
    """A call on a TT table, whose parameters are its cores."""

    kind = ""
    most_arrays = 300  # where it compiles as fast as a call for each table

    def attributes(self, axes: Any) -> dict[str, Any]:
        return (
            lookup_attributes(self.platform, self.table, self.batch, self.lookup, axes)
            | contraction_attributes(self.batch, self.lookup)
            | {
                "cores": np.int64(len(self.params)),
                "num_embeddings": np.int64(self.table.num_embeddings),
            }
        )

    def asked(self) -> dict[str, bool]:
        """Options of the op that need working memory."""
        return {}

    @classmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int:
        del columns
        platform = calls[0].platform
        counts = [math.prod(args["ids"].shape[:2]) for args in given]
        of_each = [
            _workspace(platform, cls.op, call.table.sizes, count, **call.asked())
            for call, count in zip(calls, counts, strict=True)
        ]
        return native(platform).tables_workspace_size(of_each)


class TTForward(ForwardPass, TTCall):
    blocked_results = ("out", "plan", "saved")

    def results(self, args: Named) -> Types:
        ids, plan, saved = args["ids"], 0, 0
        if self.lookup.wanted.names:
            plan, saved = blocked_sizes(self.platform, self.operands, self.table.sizes)
        return {
            "out": self.operands.sums_type(ids.shape[0], self.table.features),
            "plan": jax.ShapeDtypeStruct((ids.shape[0], plan), jnp.int32),
            "saved": jax.ShapeDtypeStruct((ids.shape[0], saved), self.operands.accum),
        }

    def asked(self) -> dict[str, bool]:
        return {"own_plan": not self.lookup.wanted.names}

    def residuals(self, found: Named) -> Arrays:
        return found["plan"], found["saved"], *super().residuals(found)


class TTGradientCall(GradientPass, TTCall):
    def saved(self, residuals: Arrays) -> dict[str, jax.Array]:
        plan, saved, _ = residuals
        return {"plan": plan, "saved": saved}

    def asked(self) -> dict[str, bool]:
        return {"weights": self.lookup.wanted.weights, "resharded": is_resharded(self.batch.ids)}


class TTBackward(BackwardPass, TTGradientCall):
    def results(self, args: Named) -> Types:
        touched = jax.ShapeDtypeStruct((sum(self.table.sizes.row_factors),), jnp.int32)
        return {"touched": touched, **super().results(args)}


class TTUpdate(UpdatePass, TTGradientCall):
    def __init__(self, platform: str, call: Call, residuals: Arrays, g: jax.Array | None):
        super().__init__(platform, call, residuals, g)
        self.backward = TTBackward(platform, call, residuals, g)

    def asked(self) -> dict[str, bool]:
        return super().asked() | {"skip_nonfinite": self.table.update.skip_nonfinite}

    @classmethod
    def of_tables(
        cls, calls: Sequence[Any], wide: ConcatLayout | None, args: Named, split: Split
    ) -> Named:
        """Where a batch is sharded, sums the gradients of all shards, then steps in the same way on each device."""
        # In a `shard_map`, the batches of some tables may be sharded over other axes, or over none.
        axes_of_each = [call.lookup.axis_name or split.axes for call in calls]
        if not any(axes_of_each):
            return super().of_tables(calls, wide, args, split)
        given = unflatten_tables(args, len(calls))
        gradients, dweights = _gradients_of_shards(calls, given, axes_of_each)
        # The op "apply" has no ids, and the backward pass only the ids of its shard.
        refused = jnp.stack(
            [
                reference.poisoned(call.table, shard_of(call.batch, own), call.lookup, axes)
                for call, own, axes in zip(calls, given, axes_of_each, strict=True)
            ]
        )
        inverse, allowed = args["scale"].reshape(-1, 2).T
        scale = jnp.stack([inverse, jnp.where(refused, 0, allowed)], axis=1).reshape(-1)
        operands = [
            {"touched": grads["touched"]}
            | {name: own[name] for name in call.changed}
            | {name: grads[name] for name in call.backward.gradient_types(own)}
            for call, own, grads in zip(calls, given, gradients, strict=True)
        ]
        applied = jax.ShapeDtypeStruct((len(calls),), jnp.float32)
        platform = calls[0].platform
        found = native_call(
            platform,
            f"{cls.kind}apply",
            {"hyper": args["hyper"], "scale": scale, "seed": args["seed"]}
            | flatten_tables(operands),
            {"applied": applied} | flatten_tables(types_of(call.changed) for call in calls),
            _workspace_of_all(
                platform, [_workspace(platform, "apply", call.table.sizes, 0) for call in calls]
            ),
            _attributes(calls, axes_of_each),
        )
        found["applied"] = jnp.where(refused, 0, found["applied"])
        return found | flatten_tables({"dweights": of_table} for of_table in dweights)


def _attributes(calls: Sequence[TTCall], axes_of_each: Sequence[Any]) -> dict[str, Any]:
    """The attributes of each table, and of the call."""
    pairs = enumerate(zip(calls, axes_of_each, strict=True))
    return {str(k): call.attributes(axes) for k, (call, axes) in pairs} | {
        "caller": calls[0].caller
    }


def _gradients_of_shards(
    updates: Sequence[TTUpdate], given: Sequence[Named], axes_of_each: Sequence[Any]
) -> tuple[Sequence[Named], Sequence[jax.Array]]:
    """By table, what a backward pass finds of the cores, summed over all shards, and the gradients of the weights."""
    backwards = [update.backward for update in updates]
    operands, varying = [], []
    for call, args in zip(backwards, given, strict=True):
        blocked = {name: args[name] for name in call.blocked}
        varying.append(varying_axes(blocked))
        params = {name: args[name] for name in call.params}
        operands.append(blocked | vary_over(params, varying[-1]))
    pairs = zip(backwards, operands, strict=True)
    found = native_call(
        backwards[0].platform,
        f"{TTBackward.kind}{TTBackward.op}",
        flatten_tables(operands),
        flatten_tables(call.results(args) for call, args in pairs),
        None if backwards[0].platform == "cpu" else TTBackward.workspace(backwards, operands, 0),
        _attributes(backwards, axes_of_each),
    )
    of_each = list(map(vary_over, unflatten_tables(found, len(updates)), varying))
    dweights = [arrays.pop("dweights") for arrays in of_each]
    summed = [
        lax.psum(arrays, axes) if axes else arrays
        for arrays, axes in zip(of_each, axes_of_each, strict=True)
    ]
    return summed, dweights


class TrainTable(NativeTable):
    """A table whose parameters are the cores of a tensor train."""

    calls: ClassVar[Calls] = Calls(TTForward, TTBackward, TTUpdate)

    @property
    @abc.abstractmethod
    def sizes(self) -> TrainSizes:
        """The sizes of the cores."""

    def plan(self, params: Params, batch: Batch, out: jax.Array, lookup: Lookup) -> Params:
        """Residuals for a backward pass without a forward pass over the whole batch.

        ``out`` is the result that was computed in another way; it only orders the update after it.
        """
        if lookup.method == "reference":
            return ()
        axes = varying_axes(params, batch)
        params, batch, out = vary_over((params, batch, out), axes)

        def native(platform: str, params: Params, batch: Batch, out: jax.Array) -> Any:
            return vary_over(_planned(platform, self, params, batch, out, lookup), axes)

        def reference(params: Params, batch: Batch, out: jax.Array) -> Any:
            platform = backend.native_platforms()[0]
            saved = jax.eval_shape(lambda *args: native(platform, *args), params, batch, out)
            return vary_over(zeros_like(saved), axes)

        return backend.run(lookup.method, native, reference, params, batch, out)
