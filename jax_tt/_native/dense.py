"""Ops of dense and quantized tables on the native kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._jax.vma import all_shards, own_shard
from jax_tt._native.call import Named, native, numbered, types_of
from jax_tt._native.operands import (
    step_operands,
    update_attributes,
    weights_result,
)
from jax_tt._native.partition import Arrays
from jax_tt._native.table_call import Calls, TableCall, Types
from jax_tt._table.groups import Call


class DenseCall(TableCall):
    """A call on a dense or quantized table, whose one parameter has its rows."""

    kind = "dense_"
    together_on = ("cpu", "cuda", "cuda_emulated")
    in_columns = True
    most_arrays = 600

    @classmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int | None:
        platform = calls[0].platform
        if platform == "cpu":
            return None
        return native(platform).dense_workspace_size(
            cls.op,
            [call.table.num_embeddings for call in calls],
            [call.table.features for call in calls],
            [math.prod(args["ids"].shape[:2]) for args in given],
            columns,
        )


class Forward(DenseCall):
    op = "forward"
    blocked_results = ("out",)

    def results(self, args: Named) -> Types:
        return {"out": self.operands.sums_type(args["ids"], self.table.features)}

    def finished(self, found: Named) -> tuple[jax.Array, Arrays]:
        out, operands = found["out"], self.operands
        sums = out.reshape(operands.groups, operands.bags, self.table.features)
        # The forward result only orders the update after the forward pass; otherwise XLA would copy the table.
        return sums, (out,) if self.lookup.wanted.names else ()


class Backward(DenseCall):
    op = "backward"
    blocked_results = ("dweights",)

    def __init__(self, platform: str, call: Call, residuals: Arrays, g: jax.Array | None):
        del residuals
        super().__init__(platform, call)
        if g is not None:
            self.blocked |= self.operands.gradient(g)

    def results(self, args: Named) -> Types:
        return {
            "dweights": self.operands.weights_type(args["ids"], self.lookup.wanted.weights),
            **self.gradient_types(),
        }

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        del args
        return {**found, **self.summed_gradients(found, axes)}

    def finished(self, found: Named) -> tuple[Arrays, jax.Array | None]:
        return self.gradients(found), weights_result(self.batch, found["dweights"], self.lookup)


class Update(DenseCall):
    op = "update"
    blocked_results = ("dweights",)
    appended = ("hyper", "scale", "seed")
    appended_results = ("applied",)

    def __init__(self, platform: str, call: Call, residuals: Arrays, g: jax.Array | None):
        super().__init__(platform, call)
        if g is not None:
            (out,) = residuals
            self.blocked = {"out": out, **self.blocked, **self.operands.gradient(g)}
        self.slots = numbered("slot", *self.table.spec.stepped_slots(call.state))
        self.whole = step_operands(call.values) | self.params | self.slots

    def gathered(self, args: Named, axes: Any) -> Named:
        axes = self.lookup.axis_name or axes
        if not axes:
            return args
        # Every replica applies the update of the whole batch: ids and output gradients are smaller than a table.
        gathered = {name: all_shards(args[name], axes) for name in self.blocked if name != "out"}
        first = lax.psum(args["out"].reshape(-1)[:1], axes)  # to run after the forward pass
        return {**args, **gathered, "out": first}

    def results(self, args: Named) -> Types:
        return {
            "applied": jax.ShapeDtypeStruct((), jnp.float32),
            "dweights": self.operands.weights_type(args["ids"], self.lookup.wanted.weights),
            **types_of(self.params | self.slots),
        }

    def attributes(self, axes: Any) -> dict[str, Any]:
        assert self.table.update is not None
        storage = self.table.spec.storage(self.params)
        update = update_attributes(self.table.update, storage, self.whole["hyper"])
        return super().attributes(self.lookup.axis_name or axes) | update

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        axes = self.lookup.axis_name or axes
        if not axes:
            return found
        dweights = own_shard(found["dweights"], args["ids"].shape[0], axes)
        return {**found, "dweights": dweights}

    def finished(
        self, found: Named
    ) -> tuple[Arrays, tuple[Arrays, ...], jax.Array, jax.Array | None]:
        dweights = weights_result(self.batch, found["dweights"], self.lookup)
        slots = tuple(found[name] for name in self.slots)
        rows = tuple(found[name] for name in self.params)
        return rows, (slots,), found["applied"], dweights


DENSE = Calls(Forward, Backward, Update)
