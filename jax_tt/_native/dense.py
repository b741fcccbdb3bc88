"""Ops of dense and quantized tables on the native kernels.

A table that is sharded over the devices is looked up in each shard: by its rows, all shards look up the whole batch,
skip the ids of other shards, and sum the results; by its columns, each shard has these columns of the results.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base import reports
from jax_tt._ids.batch import present, spread_to_positions
from jax_tt._ids.id_space import digits_in_range, in_shard
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

ROWS, COLUMNS = "rows", "columns"


class DenseCall(TableCall):
    """A call on a dense or quantized table, whose one parameter has its rows."""

    kind = "dense_"
    in_columns = True
    most_arrays = 600

    def dimensions(self) -> dict[str, Dimensions]:
        # The rows of quantized tables have a scale in front.
        divisible = not self.table.row_attributes
        if self.op == "update":
            divisible &= self.table.update.optimizer.elementwise
        of_sums: Dimensions = (None, None, None, COLUMNS if divisible else None)
        of_rows: Dimensions = (ROWS, COLUMNS if divisible else UNDIVIDED)
        ((name, _),) = self.params.items()
        return {"out": of_sums, "g": of_sums, name: of_rows, f"d{name}": of_rows}

    def on_shard(self, axes: Mapping[str, tuple[str, ...]]) -> Shard:
        return SHARDS[type(self)](self, axes)

    @property
    def rows(self) -> int:
        """Rows of the table on this device."""
        return self.table.num_embeddings

    @property
    def features(self) -> int:
        """Columns of the table on this device."""
        return self.table.features

    @classmethod
    def workspace(cls, calls: Sequence[Any], given: Sequence[Named], columns: int) -> int:
        return native(calls[0].platform).dense_workspace_size(
            cls.op,
            [call.rows for call in calls],
            [call.features for call in calls],
            [math.prod(args["ids"].shape[:2]) for args in given],
            columns,
        )


class Forward(ForwardPass, DenseCall):
    blocked_results = ("out",)

    def results(self, args: Named) -> Types:
        return {"out": self.operands.sums_type(args["ids"], self.features)}


class Backward(BackwardPass, DenseCall):
    pass


class Update(UpdatePass, DenseCall):
    def dimensions(self) -> dict[str, Dimensions]:
        named = super().dimensions()
        (name,) = self.params
        for slot, array in self.slots.items():
            if array.shape[0] == self.table.num_embeddings:
                named[slot] = named[name][: array.ndim]
        return named

    def gathered(self, args: Named, axes: Any) -> Named:
        axes = self.lookup.axis_name or axes
        if not axes:
            return args
        # Every replica applies the update of the whole batch: ids and output gradients are smaller than a table.
        gathered = {name: all_shards(args[name], axes) for name in self.blocked if name != "out"}
        first = lax.psum(args["out"].reshape(-1)[:1], axes)  # to run after the forward pass
        return {**args, **gathered, "out": first}

    def attributes(self, axes: Any) -> dict[str, Any]:
        return super().attributes(self.lookup.axis_name or axes)

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        axes = self.lookup.axis_name or axes
        if not axes:
            return found
        dweights = own_shard(found["dweights"], args["ids"].shape[0], axes)
        return {**found, "dweights": dweights}


class Shard(DenseCall):
    """A call on a device that has a shard of a table, or all of it.

    Attributes:
        rows_over, columns_over: the mesh axes that the rows and columns of the table are divided over.
        batch_of_all: the batch without ids of other shards, which are marked as padding in ``batch``.
    """

    def __init__(self, call: DenseCall, axes: Mapping[str, tuple[str, ...]]):
        vars(self).update(vars(call))
        self.rows_over, self.columns_over = axes.get(ROWS, ()), axes.get(COLUMNS, ())
        self.over = (*self.rows_over, *self.columns_over)
        self.batch_of_all = call.batch
        if self.rows_over:
            self.batch = dataclasses.replace(call.batch, padded=True)

    @property
    def rows(self) -> int:
        return self.table.num_embeddings // _size(self.rows_over)

    @property
    def features(self) -> int:
        return self.table.features // _size(self.columns_over)

    def attributes(self, axes: Any) -> dict[str, Any]:
        found = super().attributes(axes or self.over)
        label = reports.shard_label(self.table.name or "", self.table.num_embeddings)
        return {**found, "table": label} if self.rows_over else found

    def gathered(self, args: Named, axes: Any) -> Named:
        return self.in_shard(super().gathered(args, axes))

    def in_shard(self, args: Named) -> Named:
        """The operands with ids that count the rows of this shard."""
        if not self.rows_over:
            return args
        given = dataclasses.replace(self.batch_of_all, ids=args["ids"])
        (rows,) = (args[name].shape[0] for name in self.params)
        shard = lax.axis_index(self.rows_over)
        local = in_shard(self.table.ids, given, rows, shard, self.lookup.bounds)
        return {**args, "ids": local.ids}

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        dweights = found["dweights"]
        if self.over and dweights.size:
            found = {**found, "dweights": lax.psum(dweights, self.over)}
        return super().summed(found, args, axes)


class ForwardShard(Shard, Forward):
    communicates = True

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        del args, axes
        return {"out": lax.psum(found["out"], self.rows_over)} if self.rows_over else found


class BackwardShard(Shard, Backward):
    def gathered(self, args: Named, axes: Any) -> Named:
        if self.takes_all(args, axes):
            args = {**args, **{name: all_shards(args[name], axes) for name in self.blocked}}
        return super().gathered(args, axes)

    def takes_all(self, args: Named, axes: Any) -> bool:
        """Whether a shard takes the gradients of the whole batch: they are smaller than the gradient of the shard."""
        (size,) = (args[name].size for name in self.params)
        return bool(axes and self.over) and args["g"].size * _size(axes) <= size

    def summed(self, found: Named, args: Named, axes: Any) -> Named:
        if not self.takes_all(args, axes):
            return super().summed(found, args, axes)
        found = super().summed(found, args, ())
        dweights = own_shard(found["dweights"], args["ids"].shape[0], axes)
        return {**found, "dweights": dweights}


class UpdateShard(Shard, Update):
    @classmethod
    def of_tables(
        cls, calls: Sequence[Any], wide: ConcatLayout | None, args: Named, split: Split
    ) -> Named:
        scales, seeds = (args[name].reshape(len(calls), 2) for name in ("scale", "seed"))
        of_each = zip(calls, unflatten_tables(args, len(calls)), scales, seeds, strict=True)
        stepped = (call.step_in_shard(own, *of, split.axes) for call, own, *of in of_each)
        scale, seed, finite = zip(*stepped, strict=True)
        args = {**args, "scale": jnp.concatenate(scale), "seed": jnp.concatenate(seed)}
        found = super().of_tables(calls, wide, args, split)
        return {**found, "applied": found["applied"] * jnp.stack(finite)}

    def step_in_shard(
        self, args: Named, scale: jax.Array, seed: jax.Array, axes: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Scale and seed of a shard, which rounds differently from others, and whether the step is not refused.

        All shards refuse gradients that are not finite, although only some of them have rows with such gradients.
        """
        finite = jnp.ones((), jnp.float32)
        if not self.over:
            return scale, seed, finite
        if self.table.update.skip_nonfinite:
            finite = lax.pmin(
                self._finite(args, scale[0]).astype(jnp.float32), (*axes, *self.columns_over)
            )
            scale = scale.at[0].set(jnp.where(finite > 0, scale[0], jnp.nan))
        return scale, seed.at[0].set(seed[0] ^ lax.axis_index(self.over).astype(seed.dtype)), finite

    def _finite(self, args: Named, inv_scale: jax.Array) -> jax.Array:
        """Whether sums of as many gradients as the batch has, all as large as the largest, are finite."""
        batch = shard_of(self.batch_of_all, args)
        if not args["g"].size or not batch.ids.size:
            return jnp.ones((), bool)
        of_bags = jnp.max(jnp.abs(args["g"]), axis=-1, keepdims=True)
        largest = spread_to_positions(batch, of_bags.reshape(-1, *of_bags.shape[2:]))[..., 0]
        if args["weights"].size:
            largest = largest * jnp.abs(args["weights"]).reshape(batch.ids.shape)
        reads = present(batch)
        if self.lookup.bounds != "clip":
            reads &= digits_in_range(self.table.ids, batch)[1]
        largest = jnp.max(jnp.where(reads, largest, 0)) * jnp.abs(inv_scale).astype(largest.dtype)
        return jnp.isfinite(largest * math.prod(self.batch_of_all.ids.shape[:2]))


def _size(axes: tuple[str, ...]) -> int:
    return lax.axis_size(axes) if axes else 1


SHARDS: dict[Any, Any] = {Forward: ForwardShard, Backward: BackwardShard, Update: UpdateShard}
DENSE = Calls(Forward, Backward, Update)
