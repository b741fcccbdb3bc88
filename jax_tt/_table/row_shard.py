"""What a device does with a shard of the rows of a table, inside a ``shard_map`` and where XLA partitions a call.

It looks up the whole batch in its rows, and the sums of all shards are added. All of them step their rows, or none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ids.batch import Batch, present, spread_to_positions
from jax_tt._ids.id_space import digits_in_range, in_shard
from jax_tt._jax.vma import on_all_devices, varying_axes
from jax_tt._table.options import Lookup
from jax_tt._table.sharding import can_be_placed, check_slots, rows_to_shard, shard_of
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._table.wrapper import is_sharded


class RowShard(NamedTuple):
    """A shard of a table.

    Attributes:
        table: of its rows.
        axes: the mesh axes that the rows are sharded over, of which at most one has several devices.
    """

    table: Table
    axes: tuple[str, ...]


def row_shard(table: Table, state: State) -> RowShard | None:
    """The shard that a state has, from the axes that its rows vary over; None for the state of a whole table.

    Along an axis with one device, a whole table is a shard, so that programs of shards do not depend on how many there
    are. Its results do not vary over the axis, and may be given any ``out_specs``.
    """
    if is_sharded(table) or not can_be_placed(table):
        return None
    arrays = [state[name] for name in rows_to_shard(table) if name in state]
    axes = tuple(sorted(varying_axes(arrays), key=str))
    several = [size for size in map(lax.axis_size, axes) if size > 1]
    shards = math.prod(several)
    # The types do not say in which order several axes divide the rows.
    if not axes or len(several) > 1 or arrays[0].shape[0] * shards != table.num_embeddings:
        return None
    if shards > 1:
        check_slots(table)
    return RowShard(shard_of(table, table.num_embeddings // shards, table.features), axes)


def batch_on_shard(
    shard: RowShard, table: Table, batch: Batch, bounds: str
) -> tuple[RowShard | None, Batch]:
    """The shard, and the batch of ``table`` as one of the shard; None for the whole table."""
    own = varying_axes(batch) & set(shard.axes)
    if any(lax.axis_size(axis) > 1 for axis in own):
        names = ", ".join(map(repr, sorted(own)))
        raise ValueError(
            f"{table.ids.label}ids: got other ids, offsets or weights on every device along {names}, over which the "
            "rows of the table are sharded; expected the same ones there, since every device looks up the rows that it "
            f"has. Leave {names} out of their in_specs, or take jax.lax.all_gather(x, {names}, tiled=True, "
            "to='invarying')."
        )
    axes = tuple(axis for axis in shard.axes if axis not in own)
    if not axes:  # one device has all rows and ids
        return None, batch
    rows = shard.table.num_embeddings
    return RowShard(shard.table, axes), in_shard(table.ids, batch, rows, axes, bounds)


def step_on_shard(
    table: Table,
    batch: Batch,
    g: jax.Array,
    lookup: Lookup,
    values: dict[str, jax.Array],
    axes: tuple[str, ...],
    of_batch: tuple[str, ...],
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The `step_values` of a step on one shard, and 1.0, or 0.0 if all shards refuse it.

    Shards round differently at random. With ``skip_nonfinite``, all of them refuse gradients of which a sum may not be
    finite, although only some of them have rows with such gradients: a sum of as many as the batch has, all as large as
    the largest.

    Args:
        table: the one that the ids of ``batch`` belong to, with an update.
        batch, g: the part of this device, and the gradients ``[S, nb, D]`` of its sums.
        lookup, values: as in `Table.step`.
        axes: the mesh axes that the table is sharded over.
        of_batch: those that the batch is sharded over.
    """
    assert table.update is not None
    seed = jnp.asarray(values["seed"])
    number = lax.axis_index(axes).astype(seed.dtype)
    values, finite = {**values, "seed": seed.at[0].set(seed[0] ^ number)}, jnp.ones((), jnp.float32)
    if table.update.skip_nonfinite and g.size and batch.ids.size:
        of_bags = jnp.max(jnp.abs(g), axis=-1, keepdims=True)
        largest = spread_to_positions(batch, of_bags)[..., 0]
        if batch.weights is not None:
            largest = largest * jnp.abs(batch.weights)
        reads = present(batch)
        if lookup.bounds != "clip":
            reads &= digits_in_range(table.ids, batch)[1]
        positions = math.prod(map(lax.axis_size, of_batch), start=math.prod(reads.shape))
        # Sums are scaled after they are added: a small scale does not bring back one that overflowed.
        scale = jnp.maximum(jnp.abs(values["inv_scale"]), 1).astype(largest.dtype)
        largest = jnp.max(jnp.where(reads, largest, 0)) * positions * scale
        agreed = on_all_devices(jnp.isfinite(largest), (*of_batch, *axes))
        finite = agreed.astype(jnp.float32)
        values["allowed"] = values.get("allowed", 1) * finite
    return values, finite
