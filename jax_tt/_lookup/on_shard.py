"""The lookup of a batch in the rows of a table that a device has inside a ``shard_map``."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jax_tt._ids.batch import Batch
from jax_tt._ids.shard_ids import in_shard
from jax_tt._jax.vma import varying_axes
from jax_tt._table.row_shard import RowShard
from jax_tt._table.table import Table


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
