"""`RowShard`: the rows of a table that a device has inside a ``shard_map``, and the lookup of a batch in them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax import lax

from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import in_shard
from jax_tt._ids.placement import Placement
from jax_tt._jax.vma import varying_axes
from jax_tt._table.sharding import can_be_placed, check_sharding, rows_to_shard, shard_of
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
        _check(table, shards)
    return RowShard(shard_of(table, table.num_embeddings // shards, table.features), axes)


def _check(table: Any, shards: int) -> None:
    check_sharding(table, Placement.contiguous().layout(table.num_embeddings, shards))
    if table.update is not None and table.update.skip_nonfinite:
        raise ValueError(
            f"{table.ids.label}skip_nonfinite: got True for a table whose rows are sharded inside a shard_map, where "
            "no device sees the gradients of all rows; expected False, or the same call under jax.jit alone, with "
            "arrays that are sharded in the same way."
        )


def on_shard(
    shard: RowShard, table: Table, batch: Batch, values: Any, bounds: str
) -> tuple[RowShard | None, Batch, Any]:
    """The shard, and the batch and the `step_values` of ``table`` as those of the shard; None for the whole table."""
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
        return None, batch, values
    number = lax.axis_index(axes)
    batch = in_shard(table.ids, batch, shard.table.num_embeddings, number, bounds)
    if values:
        # Shards round differently at random.
        seed: jax.Array = values["seed"]
        values = {**values, "seed": seed.at[0].set(seed[0] ^ number.astype(seed.dtype))}
    return RowShard(shard.table, axes), batch, values
