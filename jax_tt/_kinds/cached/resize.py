"""Changes the layout of a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.words import bucket_of, set_of
from jax_tt._kinds.cached.maintain import written_back
from jax_tt._kinds.cached.names import ROWS, directory_of, named_directory, outer_name
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._sets.cache_directory import CacheDirectory, add_to_statistics, init_directory
from jax_tt._sets.cache_reference import rank_within
from jax_tt._sets.row_cache import RowCache
from jax_tt._sets.scores import Scoring, converted
from jax_tt._table.check import check_state
from jax_tt._table.types import State


def resized(
    cached: RowCachedTable, state: State, new: RowCache, method: str, rows_to_come: int
) -> tuple[dict[str, Any], jax.Array]:
    """The state with another cache, for a table that will have ``rows_to_come`` rows, and the new slots."""
    check_state(cached, state)
    old, table = cached.cache, cached.table
    before = directory_of(state)
    if new.gradients != old.gradients:
        raise ValueError(
            f"cache: got gradients={new.gradients!r} for a cache of gradients={old.gradients!r}; expected the same. "
            "Flush the cache and build the table anew to train its rows in another way."
        )
    layout = new.layout(rows_to_come)
    directory, slots = placed(before, old.scoring, new.scoring, layout, new.key_dtype(rows_to_come))
    tags = before.tags.reshape(-1)
    leaves = (tags >= 0) & (slots == directory.slots)
    gone = jnp.sum(leaves)
    if cached.trains_rows and old.write_back is not None:
        state = written_back(cached, state, jnp.where(leaves, tags, -1), method)
        directory = add_to_statistics(directory, written_back=gone)
    directory = add_to_statistics(directory, evicted=gone)
    dtype = new.dtype or table.spec.storage(state)
    after = {ROWS: moved(slots, state[ROWS], jnp.zeros((directory.slots, table.features), dtype))}
    update = cached.rows_table.update
    for name, kind in zip(
        cached.rows_table.spec.slot_names[0], update.optimizer.slots if update else (), strict=True
    ):
        slot = state[outer_name(name)]
        fresh = jnp.full((directory.slots, *slot.shape[1:]), kind.init, slot.dtype)
        after[outer_name(name)] = moved(slots, slot, fresh)
    return {**state, **after, **named_directory(directory)}, slots


def moved(slots: jax.Array, values: Any, fresh: Any) -> Any:
    """Values of kept rows in their new slots, and ``fresh`` elsewhere; arrays without slots are returned unchanged."""
    if values.shape[:1] != slots.shape:
        return values
    return jnp.asarray(fresh).at[slots].set(jnp.asarray(values).astype(fresh.dtype), mode="drop")


def placed(
    directory: CacheDirectory,
    old: Scoring,
    new: Scoring,
    layout: tuple[int, int, int, int],
    key_dtype: Any,
) -> tuple[CacheDirectory, jax.Array]:
    """The directory in its new shape, and the new slot of every old one; one past the last slot for evicted rows."""
    sets, ways, buckets, room = layout
    same_slots = directory.tags.shape == (sets, ways)
    if old != new or not same_slots:
        directory = converted(directory, old, new)
    tags, scores, touched = (
        values.reshape(-1) for values in (directory.tags, directory.scores, directory.touched)
    )
    tags = tags.astype(key_dtype)
    if same_slots:
        stays, slots = tags >= 0, jnp.arange(sets * ways, dtype=jnp.int32)
    else:
        home = jnp.where(tags >= 0, set_of(tags, sets), sets)
        rank = rank_within(home, sets, -scores, -touched, tags)
        stays, slots = (tags >= 0) & (rank < ways), home * ways + rank
    slots = jnp.where(stays, slots, sets * ways)
    left = (jnp.where(stays, -1, tags), scores, touched, jnp.zeros_like(scores))
    ghosts = (
        directory.ghost_tags.astype(key_dtype),
        directory.ghost_scores,
        directory.ghost_touched,
        directory.ghost_recent,
    )
    ghosts = tuple(
        jnp.concatenate([ghost.reshape(-1), row]) for ghost, row in zip(ghosts, left, strict=True)
    )
    home = jnp.where(ghosts[0] >= 0, bucket_of(ghosts[0], sets, buckets), buckets)
    rank = rank_within(home, buckets, -ghosts[1], ghosts[0])
    places = jnp.where((ghosts[0] >= 0) & (rank < room), home * room + rank, buckets * room)

    def put(into: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
        return into.reshape(-1).at[at].set(values, mode="drop").reshape(into.shape)

    empty = init_directory(sets, ways, buckets, room, key_dtype)
    return directory._replace(
        tags=put(empty.tags, slots, tags),
        scores=put(empty.scores, slots, scores),
        touched=put(empty.touched, slots, touched),
        ghost_tags=put(empty.ghost_tags, places, ghosts[0]),
        ghost_scores=put(empty.ghost_scores, places, ghosts[1]),
        ghost_touched=put(empty.ghost_touched, places, ghosts[2]),
        ghost_recent=put(empty.ghost_recent, places, ghosts[3]),
    ), slots
