"""Ops of dense and quantized tables on the native kernels.

A table that is sharded over the devices is looked up in each shard: by its rows, all shards look up the whole batch,
skip the ids of other shards, and sum the results; by its columns, each shard has these columns of the results.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base import reports
from jax_tt._ids.id_space import in_shard
from jax_tt._jax.vma import all_shards, own_shard
from jax_tt._native.call import Named, native, unflatten_tables
from jax_tt._native.operands import shard_of
from jax_tt._native.partition import UNDIVIDED, Dimensions, Split
from jax_tt._native.table_call import (
    BackwardPass,
    Calls,
    ForwardPass,
    TableCall,
    Types,
    UpdatePass,
)
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.parts_of_arrays import Part
from jax_tt._table.row_shard import step_on_shard

ROWS, COLUMNS = "rows", "columns"


class DenseCall(TableCall):
    """A call on a dense or quantized table, whose one parameter has its rows, or on the shard that a device has of it.

    Attributes:
        rows_over, columns_over: the mesh axes that the rows and columns of the table are sharded over.
    """

    kind = "dense_"
    in_columns = True
    takes_parts = True
    most_arrays = 600
    rows_over: tuple[str, ...] = ()
    columns_over: tuple[str, ...] = ()

    def dimensions(self) -> dict[str, Dimensions]:
        if any(isinstance(array, Part) for array in self.params.values()):
            return {}
        # The rows of quantized tables have a scale in front.
        divisible = not self.table.row_attributes
        if self.op == "update":
            divisible &= self.table.update.optimizer.elementwise
        of_sums: Dimensions = (None, None, None, COLUMNS if divisible else None)
        of_rows: Dimensions = (ROWS, COLUMNS if divisible else UNDIVIDED)
        ((name, _),) = self.params.items()
        return {"out": of_sums, "g": of_sums, name: of_rows, f"d{name}": of_rows}

    def on_shard(self, axes: Mapping[str, tuple[str, ...]]) -> Self:
        shard = copy.copy(self)
        shard.communicates = True
        shard.rows_over, shard.columns_over = axes.get(ROWS, ()), axes.get(COLUMNS, ())
        shard.over = (*shard.rows_over, *shard.columns_over)
        if shard.rows_over:
            label = reports.shard_label(self.table.name or "", self.table.num_embeddings)
            shard.of_shard = {"table": label, "padded": True}
        return shard

    @property
    def rows(self) -> int:
        """Rows of the table on this device."""
        return self.table.num_embeddings // math.prod(map(lax.axis_size, self.rows_over))

    @property
    def features(self) -> int:
        """Columns of the table on this device."""
        return self.table.features // math.prod(map(lax.axis_size, self.columns_over))

    @classmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int:
        return native(calls[0].platform).dense_workspace_size(
            cls.op,
            [call.rows for call in calls],
            [call.features for call in calls],
            [math.prod(args["ids"].shape[:2]) for args in given],
            columns,
        )

    def gathered(self, args: Named, axes: Any) -> Named:
        """The operands with ids that count the rows of this shard."""
        if not self.rows_over:
            return args
        given = dataclasses.replace(self.batch, ids=args["ids"])
        local = in_shard(self.table.ids, given, self.rows, self.rows_over, self.lookup.bounds)
        return {**args, "ids": local.ids}

    def of_all_shards(self, found: Named) -> Named:
        """The results with the gradients of weights, to which every shard adds its own."""
        if not self.over or not found["dweights"].size:
            return found
        return {**found, "dweights": lax.psum(found["dweights"], self.over)}


class DenseForward(ForwardPass, DenseCall):
    blocked_results = ("out",)

    def results(self, args: Named) -> Types:
        # The bags of many features are one block.
        blocks = args["ids"].shape[0] if "ids" in args else 1
        return {"out": self.operands.sums_type(blocks, self.features)}

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        del args, axes
        return {"out": lax.psum(found["out"], self.rows_over)} if self.rows_over else found


class DenseBackward(BackwardPass, DenseCall):
    def gathered(self, args: Named, axes: Any) -> Named:
        if self.takes_all(args, axes):
            args = {**args, **{name: all_shards(args[name], axes) for name in self.blocked}}
        return super().gathered(args, axes)

    def takes_all(self, args: Named, axes: Any) -> bool:
        """Whether a shard takes the gradients of the whole batch: they are smaller than the gradient of the shard."""
        (size,) = (types.size for types in self.gradient_types(args).values())
        return bool(axes and self.over) and args["g"].size * lax.axis_size(axes) <= size

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        takes_all = self.takes_all(args, axes)
        found = super().summed(self.of_all_shards(found), args, () if takes_all else axes)
        return own_weights(found, args, axes) if takes_all else found


class DenseUpdate(UpdatePass, DenseCall):
    def dimensions(self) -> dict[str, Dimensions]:
        named = super().dimensions()
        if not named:
            return {}
        (name,) = self.params
        for slot, array in self.slots.items():
            if array.shape[0] == self.table.num_embeddings:
                named[slot] = named[name][: array.ndim]
        return named

    @classmethod
    def of_shards(
        cls, shards: Sequence[Any], wide: ConcatLayout | None, args: Named, split: Split
    ) -> Named:
        scales, seeds = (args[name].reshape(len(shards), 2) for name in ("scale", "seed"))
        of_each = zip(shards, unflatten_tables(args, len(shards)), scales, seeds, strict=True)
        stepped = (call.step_in_shard(own, *of, split.axes) for call, own, *of in of_each)
        scale, seed, finite = zip(*stepped, strict=True)
        args = {**args, "scale": jnp.concatenate(scale), "seed": jnp.concatenate(seed)}
        found = super().of_shards(shards, wide, args, split)
        return {**found, "applied": found["applied"] * jnp.stack(finite)}

    def step_in_shard(
        self, args: Named, scale: jax.Array, seed: jax.Array, axes: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scale and seed of a shard, and 1.0, or 0.0 if all shards refuse the step."""
        if not self.over:
            return scale, seed, jnp.ones((), jnp.float32)
        batch, (inverse, allowed) = shard_of(self.batch, args), scale
        weights = args["weights"].reshape(batch.ids.shape) if args["weights"].size else None
        batch = dataclasses.replace(batch, weights=weights)
        g = args["g"].reshape(-1, *args["g"].shape[2:])
        values = {"inv_scale": inverse, "allowed": allowed, "seed": seed}
        values, finite = step_on_shard(self.table, batch, g, self.lookup, values, self.over, axes)
        return jnp.stack([inverse, values["allowed"]]), values["seed"], finite

    def gathered(self, args: Named, axes: Any) -> Named:
        if axes := self.lookup.axis_name or axes:
            # Every replica applies the update of the whole batch: ids and output gradients are smaller than a table.
            own = {name: all_shards(args[name], axes) for name in self.blocked if name != "out"}
            first = lax.psum(args["out"].reshape(-1)[:1], axes)  # to run after the forward pass
            args = {**args, **own, "out": first}
        return super().gathered(args, axes)

    def attributes(self, axes: Any) -> dict[str, Any]:
        return super().attributes(self.lookup.axis_name or axes)

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        found, axes = self.of_all_shards(found), self.lookup.axis_name or axes
        return own_weights(found, args, axes) if axes else found


def own_weights(found: Named, args: Named, axes: Any) -> Named:
    """The results for the whole batch with the gradients of the weights of this device."""
    return {**found, "dweights": own_shard(found["dweights"], args["ids"].shape[0], axes)}


DENSE = Calls(DenseForward, DenseBackward, DenseUpdate)
