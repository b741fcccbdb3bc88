"""A batch in front of a cache: its keys, its hits and misses, and what it counts in the directory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._directories.batch_clock import next_batch
from jax_tt._directories.cache_directory import OBSERVED, CacheDirectory, add_to_statistics
from jax_tt._directories.scores import Scoring, caught_up, counted, stamp
from jax_tt._ids.batch import HIGHEST_BIT, Batch, padding_mark, present, unsigned, with_marks
from jax_tt._ids.id_space import digits_in_range
from jax_tt._jax.vma import all_shards, varying_axes
from jax_tt._native import cache_backend
from jax_tt._table.table import Table


def cache_keys(table: Table, batch: Batch, bounds: str, dtype: Any) -> jax.Array:
    """Row of every position ``[S, cap]``; -1 for padding, positions outside every bag, and ids out of range."""
    here = present(batch)
    if batch.split:
        digits, ok = digits_in_range(table.ids, batch)
        row = jnp.zeros(batch.ids.shape[:2], dtype)
        for digit, factor in zip(digits, table.ids.radices, strict=True):
            row = row * factor + digit.astype(dtype)
    else:
        last = min(table.num_embeddings - 1, int(jnp.iinfo(batch.ids.dtype).max))
        clamped = jnp.clip(batch.ids, 0, last)
        ok = clamped == batch.ids
        row = clamped.astype(dtype)
    if bounds != "clip":
        here = here & ok
    return jnp.where(here, row, -1)


def hits_of(batch: Batch) -> Batch:
    """The hits as a batch of slots, in the shape of the full batch; misses are padding."""
    return dataclasses.replace(batch, ids=batch.slots, slots=None, padded=True)


def misses_of(table: Table, batch: Batch) -> Batch:
    """The misses as a batch of the table, in the shape of the full batch; hits are padding."""
    hit = batch.slots >= 0
    if not batch.padded:
        if table.num_embeddings > HIGHEST_BIT and unsigned(batch.ids):
            # The uint32 padding mark is a valid row of this table.
            batch = dataclasses.replace(batch, ids=batch.ids.astype(jnp.int64))
        batch = with_marks(batch)
    ids = jnp.where(
        hit[..., None] if batch.split else hit, padding_mark(batch.ids.dtype), batch.ids
    )
    return dataclasses.replace(batch, ids=ids, slots=None)


def count_batch(
    directory: CacheDirectory,
    keys: jax.Array,
    slots: jax.Array,
    scoring: Scoring,
    method: str,
    axis_name: Any = None,
) -> CacheDirectory:
    """Counts one more batch of keys, and their slots from `probe`, of any shape.

    Inside a ``shard_map`` the keys of all shards are counted, so that replicas of the directory stay equal.
    """
    axes = tuple(sorted(varying_axes(keys) - varying_axes(directory), key=str)) or axis_name
    keys, slots = keys.reshape(-1), slots.reshape(-1)
    if axes:
        keys, slots = all_shards(keys, axes), all_shards(slots, axes)
    directory = caught_up(directory, scoring)
    directory = directory._replace(clock=next_batch(directory.clock))
    now = stamp(directory, scoring)
    directory, counts = cache_backend.observe(directory, keys, slots, now, scoring.policy, method)
    named = {name: counts[k] for k, name in enumerate(OBSERVED)}
    return add_to_statistics(counted(directory, named["requested"]), calls=1, **named)
