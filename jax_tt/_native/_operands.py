"""What the native TT and dense ops have in common: the batch as the FFI targets take it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._dtypes import accumulator
from jax_tt._native.partition import inside_shard_map, num_blocks
from jax_tt._ops._batch import Batch

BOUNDS = {"clip": 0, "zero": 1, "error": 2, "unchecked": 3, "poison": 4, "warn": 5}
_MAX_POSITIONS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of a batch dealt into blocks, and their static sizes.

    Attributes:
        ids: ``[blocks, groups / blocks * capacity]``, digits with one more axis.
        offsets: ``[blocks, groups / blocks, bags + 1]``.
        weights: as ids; ``[blocks, 0]`` where there are none.
    """

    ids: jax.Array
    offsets: jax.Array
    weights: jax.Array
    blocks: int
    groups: int
    capacity: int
    bags: int

    @property
    def positions(self) -> int:
        return self.groups * self.capacity

    def out_shape(self, dim: int) -> tuple[int, ...]:
        return (self.blocks, self.groups // self.blocks, self.bags, dim)


def make_operands(spec: Any, table_dtype: Any, batch: Batch) -> Operands:
    groups, capacity = batch.ids.shape[:2]
    bags = batch.offsets.shape[1] - 1
    # Of a symbolic batch size the handler checks this itself.
    given = [n for n in (groups * capacity, groups * bags) if isinstance(n, int)]
    if max(given, default=0) > _MAX_POSITIONS:
        label = "" if spec.name is None else f"{spec.name}: "
        raise ValueError(
            f"{label}bags: got {groups * capacity} ids in {groups * bags} bags; one call takes at most "
            f"{_MAX_POSITIONS} of either. Split the batch."
        )
    blocks = num_blocks(groups)
    accum = accumulator(table_dtype)
    weights = (
        jnp.zeros((blocks, 0), accum) if batch.weights is None else batch.weights.astype(accum)
    )
    return Operands(
        ids=batch.ids.reshape(blocks, groups // blocks * capacity, *batch.ids.shape[2:]),
        offsets=batch.offsets.reshape(blocks, groups // blocks, bags + 1),
        weights=weights.reshape(
            blocks, 0 if batch.weights is None else groups // blocks * capacity
        ),
        blocks=blocks,
        groups=groups,
        capacity=capacity,
        bags=bags,
    )


def lookup_attributes(platform: str, spec: Any, batch: Batch, axes: Any) -> dict[str, Any]:
    # A GPU cannot stop a program, and one shard that stops with an error would leave the others waiting for it: both
    # make NaN, as the reference does.
    quiet = platform != "cpu" or bool(axes) or inside_shard_map(batch.ids)
    bounds = "poison" if quiet and spec.bounds == "error" else spec.bounds
    return {
        "split": batch.split,
        "padded": spec.padded,
        "bounds": np.int64(BOUNDS[bounds]),
        "table": spec.name or "",
    }


def update_attributes(kind: int, skip_nonfinite: bool, stochastic: bool) -> dict[str, Any]:
    return {
        "optimizer": np.int64(kind),
        "skip_nonfinite": bool(skip_nonfinite),
        "stochastic_rounding": bool(stochastic),
    }


def weights_shape(operands: Operands, want: bool) -> tuple[int, int]:
    return (operands.blocks, operands.positions // operands.blocks if want else 0)


def weights_result(batch: Batch, dweights: jax.Array, want: bool) -> jax.Array | None:
    return dweights.reshape(batch.ids.shape[:2]) if want else None
