"""Operands and attributes shared by the native TT and dense ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base import ffi
from jax_tt._base.arguments import mismatch
from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._native.partition import is_partitioned, num_blocks
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table
from jax_tt.optimizers import RULES, Optimizer

MAX_POSITIONS = 2**31 - 1
# What native ops do in place of an error where they cannot raise one.
QUIET = "poison"


class Operands(NamedTuple):
    """The arrays of a batch split into blocks, and their static sizes.

    Attributes:
        arrays: in the order of the targets, all of them blocked: ``ids[blocks, groups / blocks * capacity]``, digits
            with one more axis; ``offsets[blocks, groups / blocks, bags + 1]``; ``weights`` with the shape of ids, or
            ``[blocks, 0]`` without weights.
        accum: type of sums and weights.
    """

    arrays: dict[str, Any]
    accum: Any
    blocks: int
    groups: int
    positions: int
    bags: int

    def gradient(self, g: jax.Array) -> dict[str, jax.Array]:
        """The gradient of the sums, as an operand."""
        shape = (self.blocks, self.groups // self.blocks, self.bags, g.shape[-1])
        return {"g": g.reshape(shape)}

    def sums_type(self, blocks: int, features: int) -> jax.ShapeDtypeStruct:
        """Sums of the blocks of this device."""
        shape = (blocks, self.groups // self.blocks, self.bags, features)
        return jax.ShapeDtypeStruct(shape, self.accum)


def make_operands(
    table: Table, table_dtype: Any, batch: Batch, blocks: int | None = None
) -> Operands:
    """The operands, in ``blocks`` that divide the groups, or in as many as XLA may partition."""
    groups, capacity = batch.ids.shape[:2]
    bags = batch.offsets.shape[1] - 1
    # For symbolic batch sizes, the handler checks this.
    given = [n for n in (groups * capacity, groups * bags) if isinstance(n, int)]
    if max(given, default=0) > MAX_POSITIONS:
        raise ValueError(
            f"{table.ids.label}bags: got {groups * capacity} ids in {groups * bags} bags; one call takes at most "
            f"{MAX_POSITIONS} of either. Split the batch."
        )
    ids, most = batch.ids, MAX_POSITIONS
    if ids.dtype == jnp.int64 and table.num_embeddings <= most and is_partitioned():
        # XLA partitions a call without the 64-bit types of its caller.
        ids = jnp.clip(ids, -most - 1, most).astype(jnp.int32)
    blocks = num_blocks(groups) if blocks is None else blocks
    accum = accumulator(table_dtype)
    weights = np.zeros((blocks, 0), accum) if batch.weights is None else batch.weights.astype(accum)
    per_block = groups // blocks * capacity
    return Operands(
        arrays={
            "ids": ids.reshape(blocks, per_block, *batch.ids.shape[2:]),
            "offsets": batch.offsets.reshape(blocks, groups // blocks, bags + 1),
            "weights": weights.reshape(blocks, 0 if batch.weights is None else per_block),
        },
        accum=accum,
        blocks=blocks,
        groups=groups,
        positions=groups * capacity,
        bags=bags,
    )


def lookup_attributes(
    platform: str, table: Table, batch: Batch, lookup: Lookup, axes: Any
) -> dict[str, Any]:
    # GPU kernels cannot raise errors, and an error in one shard would leave the others waiting for it. Both return NaN
    # instead, as the reference does.
    sharded = axes or jax.sharding.get_abstract_mesh().manual_axes
    quiet = platform != "cpu" or bool(sharded)
    bounds = QUIET if quiet and lookup.bounds == "error" else lookup.bounds
    return {
        "split": batch.ids.ndim == 3,
        "padded": batch.padded,
        "bounds": bounds,
        "table": table.name or "",
    }


def shard_of(batch: Batch, args: Mapping[str, jax.Array]) -> Batch:
    """The part of a batch in these blocks."""
    ids, offsets = args["ids"], args["offsets"]
    groups = offsets.shape[0] * offsets.shape[1]
    return dataclasses.replace(
        batch,
        ids=ids.reshape(groups, batch.capacity, *ids.shape[2:]),
        offsets=offsets.reshape(groups, offsets.shape[-1]),
        weights=None,
        slots=None,
    )


def joined(arrays: Sequence[Any]) -> Any:
    """The concatenation, which is a constant if all arrays are."""
    constant = all(isinstance(array, np.ndarray | np.generic) for array in arrays)
    return (np if constant else jnp).concatenate(arrays)


def sentinel_operand(sentinel: jax.Array | None) -> jax.Array:
    """The sentinel; 1, which is valid, for a table without one."""
    return jnp.ones((), jnp.float32) if sentinel is None else sentinel


def hyper_operand(platform: str, optimizer: Optimizer, hyper: Mapping[str, Any]) -> jax.Array:
    """The hyper-parameters of a step, which have names, as ``[H]`` in the order of the native rule.

    Raises:
        ValueError: the native rule takes other steps, other slots or other hyper-parameters than ``optimizer``, or has
            not been registered.
        RuntimeError: the native module is older than the rule.
    """
    name, given = optimizer.kind, type(optimizer).__name__
    assert name is not None  # such rules are no native ones
    rule, owner = ffi.rule(platform, name), RULES.get(name)
    if owner is None:
        if rule is None:
            raise ValueError(
                f"optimizer: {given} is the native rule {name!r}, which this process has not registered. Pass what the "
                "extension exports to jax_tt.optimizers.register, and use the name that it returns as native_kind."
            )
        rowwise = [slot.rowwise for slot in optimizer.slots if slot.stepped]
        if rowwise != [False] * rule.entry_slots + [True] * rule.row_slots:
            raise ValueError(
                f"optimizer: {given}.slots has {rowwise.count(False)} slots per entry and {rowwise.count(True)} per "
                f"row, in the order rowwise={rowwise}; expected those of the native rule {name!r}: "
                f"{rule.entry_slots} per entry, then {rule.row_slots} per row."
            )
    elif type(optimizer).update_rows is not owner.update_rows:
        raise ValueError(
            f"optimizer: {given} has the native rule {name!r}, which takes the steps of {owner.__name__} and "
            f"not those of {given}.update_rows. Register a rule in C++, and use its name as native_kind; or "
            "let the property kind return None, and update_rows runs on all platforms."
        )
    elif rule is None:
        raise RuntimeError(
            f"optimizer: the native module for {platform} does not have the rule {name!r} of {given}; it is "
            "older than the sources. Compile it with `make native`."
        )
    missing = [field for field in rule.hyperparameters if field not in hyper]
    if missing:
        expected = f"what the native rule {name!r} takes, also {', '.join(missing)}"
        got = ", ".join(hyper) or "no names"
        raise mismatch(f"optimizer: {given}.hyperparameters", got, expected)
    return joined([hyper[field][None] for field in rule.hyperparameters])
