"""Ids in a shard of a table: the ids of its rows count from its first row, and all other ids are marked as padding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch, is_padding, padding_mark, with_marks
from jax_tt._ids.id_space import IdSpace, digits_in_range


def in_shard(space: IdSpace, batch: Batch, rows: int, shard: jax.Array, bounds: str) -> Batch:
    """A batch of the whole table as one of a shard of it.

    Ids out of range stay so in all shards, which then agree to refuse a step; the first shard reports them.

    Args:
        space: ids of the whole table.
        batch: integers that are no digits.
        rows: rows of every shard, which are neighbours.
        shard: the number of this one.
        bounds: as in `Lookup`.
    """
    (row,), in_range = digits_in_range(space, batch)
    marked = batch if batch.padded else with_marks(batch)
    padding = is_padding(batch) if batch.padded else jnp.zeros((), bool)
    most = int(jnp.iinfo(row.dtype).max)
    # Ids of a narrow type do not reach all shards.
    first = jnp.minimum(shard, most // rows).astype(row.dtype) * min(rows, most)
    local = row - first
    here = (row >= first) & (local <= min(rows - 1, most)) & (shard <= most // rows)
    in_range |= bounds == "clip"
    silent = in_range | padding | (bounds == "unchecked")
    if bounds == "warn":
        silent |= shard != 0
    away = jnp.where(silent, padding_mark(row.dtype), marked.ids)
    ids = jnp.where(here & in_range & ~padding, local, away)
    return dataclasses.replace(batch, ids=ids, padded=True)
