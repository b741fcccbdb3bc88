"""Changes of a table with a row cache: it grows, is reordered, or gets another cache."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import mismatch
from jax_tt._base.environment import resolve_method
from jax_tt._base.words import bucket_of, set_of
from jax_tt._directories.cache_directory import CacheDirectory, add_to_statistics, init_directory
from jax_tt._directories.cache_reference import rank_within
from jax_tt._directories.row_cache import RowCache
from jax_tt._directories.scores import Scoring, converted
from jax_tt._kinds.cached.maintain import written_back
from jax_tt._kinds.cached.table import (
    ROWS,
    RowCachedTable,
    cache_directory_of,
    cached_part,
    named_cache_directory,
    outer_name,
)
from jax_tt._table.change import (
    Change,
    Growth,
    Orders,
    grow,
    has_cache,
    reorder,
    restarted,
    with_cache,
)
from jax_tt._table.check import check_state
from jax_tt._table.copies import register_wrapper
from jax_tt._table.state import SCALARS, State
from jax_tt._table.table import Table

register_wrapper(RowCachedTable)


@has_cache.register(RowCachedTable)
def has_a_cache(cached: RowCachedTable) -> bool:
    del cached
    return True


@grow.register(RowCachedTable)
def grown(cached: RowCachedTable, state: State, growth: Growth) -> Change:
    """Resizes the cache if the larger table needs another layout."""
    # Refused before the layout of a cache is computed for such a number of rows.
    cached.table.shape.grow(growth.num_embeddings)
    cache, carry = cached.cache, {}
    sizes = cached.num_embeddings, growth.num_embeddings
    now, then = ((cache.layout(n), cache.key_dtype(n)) for n in sizes)
    if now != then:
        rows, method = growth.num_embeddings, resolve_method(growth.method)
        state, slots = _resized(cached, dict(state), cache, rows, method)
        carry = {ROWS: partial(moved, slots)}
    change = grow(cached.table, state, growth)
    table = dataclasses.replace(cached, table=change.table)
    return dataclasses.replace(change, table=table, carry={**change.carry, **carry})


@reorder.register(RowCachedTable)
def reordered(cached: RowCachedTable, state: State, orders: Orders) -> Change:
    """Fits the cores to the cached values of cached rows; the cache is empty afterwards."""
    if cached.trains_rows:
        tags = np.asarray(cache_directory_of(state).tags).reshape(-1)
        orders = orders._replace(replaced=(tags, np.asarray(state[ROWS])))
    change = reorder(cached.table, state, orders)
    table = dataclasses.replace(cached, table=change.table)
    steps = {outer_name(name) for name in SCALARS}
    empty = {
        name: state[name] if name in steps else value
        for name, value in table.init_cache(change.approximation.cores[0].dtype).items()
    }
    carry = {**change.carry, ROWS: restarted}
    return dataclasses.replace(change, table=table, state=change.state | empty, carry=carry)


@with_cache.register(RowCachedTable)
def cached_anew(cached: RowCachedTable, state: State, cache: RowCache, method: str) -> Change:
    if cache is None:
        expected = "a RowCache. flush() writes back what rows learned"
        raise mismatch("cache", "None", expected, error=TypeError)
    table = dataclasses.replace(cached, cache=cache)
    # The environment may name another method in the next call, which needs another program.
    method = resolve_method(method)
    after, slots = _resized(cached, dict(state), cache, cached.num_embeddings, method)
    return Change(table, after, {ROWS: partial(moved, slots)})


def resize(table: Table, state: State, cache: RowCache, method: str = "auto") -> Change:
    """Changes the capacity, ways, policy or counters of the cache of a table.

    A set keeps its hottest rows, with their values and optimizer state bit for bit; if sets or ways change, rows may
    move to other slots. The other rows are written back into the cores according to ``write_back`` of the present cache
    and become ghosts. Ghosts keep their scores as far as there is room. If the cache grows, new slots are filled when
    it is next populated; some rows may be evicted even then, since the set of a row depends on the number of sets,
    unless the new number is a multiple of the old one. Under another policy, cached rows keep the step of their last
    request, and counts that the old policy did not keep start at zero.

    Args:
        table: a table with a row cache.
        state: its arrays by name. Call this outside of a loss: the cores may change.
        cache: the new `RowCache`, with the same ``gradients``.
        method: as in `Lookup`.

    Returns:
        The table with the new cache, and its state.

    Raises:
        ValueError: the table has no row cache, or ``cache`` has other ``gradients``.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=jax_tt.RowCache(100, ways=4))
    >>> state = table.init(jax.random.key(0))
    >>> _, state = jax_tt.lookup(table, state, jnp.array([7, 8]))
    >>> state = jax_tt.cache.populate(table, state)
    >>> table, state = jax_tt.cache.resize(table, state, jax_tt.RowCache(200, ways=4))
    >>> state["cache_rows"].shape, jax_tt.cache.statistics(table, state)["occupied"]
    ((200, 8), 2)
    """
    cached_part(table)
    return with_cache(table, state, cache, method)


@partial(jax.jit, static_argnums=(0, 2, 3, 4))
def _resized(
    cached: RowCachedTable, state: State, new: RowCache, rows_to_come: int, method: str
) -> tuple[dict[str, Any], jax.Array]:
    """The state with another cache, for a table that will have ``rows_to_come`` rows, and the new slots."""
    check_state(cached, state)
    old, table = cached.cache, cached.table
    before = cache_directory_of(state)
    if new.gradients != old.gradients:
        got = f"gradients={new.gradients!r} for a cache of gradients={old.gradients!r}"
        fix = "Flush the cache and build the table anew to train its rows in another way."
        raise mismatch("cache", got, "the same", fix)
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
    for name, initial in cached.slots.items():
        slot = state[name]
        fresh = jnp.full((directory.slots, *slot.shape[1:]), initial, slot.dtype)
        after[name] = moved(slots, slot, fresh)
    return {**state, **after, **named_cache_directory(directory)}, slots


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
