"""Maintenance of a row cache between steps: populate, refresh, flush and reset work under ``jit``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._directories.batch_clock import SOON, WHOLE, counted_on
from jax_tt._directories.cache_directory import (
    POPULATED,
    CacheDirectory,
    add_to_statistics,
    init_directory,
)
from jax_tt._directories.scores import aged
from jax_tt._ids.batch import single_rows
from jax_tt._kinds.cached.table import (
    ROWS,
    RowCachedTable,
    cache_directory_of,
    cached_part,
    named_cache_directory,
)
from jax_tt._kinds.cached.write_back import write_back
from jax_tt._lookup.pooled_sums import choose_execution
from jax_tt._native import cache_backend, hash_backend
from jax_tt._native.hash import Clock
from jax_tt._table.change import maintain
from jax_tt._table.check import check_state
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import Table, scope_of


def populate(table: Table, state: State, method: str = "auto") -> dict[str, Any]:
    """Replaces cold cached rows by hot rows that were counted.

    With ``gradients="rows"``, evicted rows are written back into the cores, inserted rows are read from the cores with
    fresh optimizer state, and the others keep their values bit for bit. With ``gradients="cores"``, all rows are read
    again.

    Args:
        table: a table with a row cache, such as `tt_table` makes with ``cache=``.
        state: its arrays by name. Call this outside of a loss: the cores may change.
        method: as in `Lookup`.

    Returns:
        The state after the exchange.

    Raises:
        ValueError: the table has no row cache, or the state is not one of this table.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=jax_tt.RowCache(100, ways=4))
    >>> state = table.init(jax.random.key(0))
    >>> _, state = jax_tt.lookup(table, state, jnp.array([7, 7, 8]))
    >>> state = jax_tt.cache.populate(table, state)
    >>> jax_tt.cache.statistics(table, state)["occupied"]
    2
    """
    return populated(_checked(table, state), state, method)


def populated(cached: RowCachedTable, state: State, method: str) -> dict[str, Any]:
    """`populate` without a check: `fill` counts a sample in other counters than those of the table."""
    before = cache_directory_of(state)
    with jax.named_scope(scope_of([cached])):
        directory, evicted, counts = cache_backend.populate(before, method)
    named = {name: counts[k] for k, name in enumerate(POPULATED)}
    directory = with_clock_counted_on(aged(directory, cached.cache.scoring), method)
    directory = add_to_statistics(directory, refreshes=1, **named)
    if not cached.trains_rows:
        rows = _read(cached, state, directory.tags, method).astype(state[ROWS].dtype)
        return {**state, ROWS: rows, **named_cache_directory(directory)}
    if cached.cache.write_back is not None:
        state = written_back(cached, state, evicted.reshape(-1), method)
        directory = add_to_statistics(directory, written_back=named["evicted"])
    came = directory.tags != before.tags
    new = _read(cached, state, jnp.where(came, directory.tags, -1), method)
    return {**_with_rows(cached, state, came.reshape(-1), new), **named_cache_directory(directory)}


def with_clock_counted_on(directory: CacheDirectory, method: str) -> CacheDirectory:
    """A directory that was just populated, counted on from an earlier batch before its numbers come to their end."""
    clock, numbers = directory.clock, [directory.touched, directory.ghost_touched]
    asked = Clock(clock, numbers, (WHOLE, WHOLE), SOON)
    ((touched, ghost_touched),) = hash_backend.set_back_many([asked], [method])
    clock = counted_on(clock, SOON)
    return directory._replace(
        touched=touched, ghost_touched=ghost_touched, clock=clock, refreshed=jnp.copy(clock)
    )


@maintain.register(RowCachedTable)
def refresh(table: Table, state: State, method: str = "auto") -> dict[str, Any]:
    """`populate` if the last was ``refresh_every`` counted batches ago; otherwise the unchanged state.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> cache = jax_tt.RowCache(100, ways=4, refresh_every=1)
    >>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=cache)
    >>> state = table.init(jax.random.key(0))
    >>> _, state = jax_tt.lookup(table, state, jnp.array([7, 8]))
    >>> state = jax_tt.cache.refresh(table, state)
    >>> jax_tt.cache.statistics(table, state)["refreshes"]
    1
    """
    cached = _checked(table, state)
    every = cached.cache.refresh_every
    if every is None:
        return dict(state)
    directory = cache_directory_of(state)
    # Not clock % refresh_every: a step may count several batches or none.
    due = directory.clock - directory.refreshed >= every
    return jax.lax.cond(due, lambda state: populate(cached, state, method), dict, dict(state))


def flush(table: Table, state: State, method: str = "auto") -> dict[str, Any]:
    """Writes all cached rows back into the cores, which then are the whole model, and reads the rows again.

    What the fit does not capture is lost; with ``write_back=None``, that is everything the rows learned. No row is
    evicted, and counts do not change. It takes the arguments of `populate` and raises the same errors.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=jax_tt.RowCache(100, ways=4))
    >>> state = table.init(jax.random.key(0))
    >>> _, state = jax_tt.lookup(table, state, jnp.array([7, 8]))
    >>> state = jax_tt.cache.flush(table, jax_tt.cache.populate(table, state))
    >>> jax_tt.cache.statistics(table, state)["written_back"]
    2
    """
    cached = _checked(table, state)
    directory = cache_directory_of(state)
    tags = directory.tags
    if cached.trains_rows and cached.cache.write_back is not None:
        state = written_back(cached, state, tags.reshape(-1), method)
        directory = add_to_statistics(directory, written_back=jnp.sum(tags >= 0))
    # Rows stay cached and continue to train, so fused rows keep their optimizer state.
    rows = _read(cached, state, tags, method).astype(state[ROWS].dtype)
    return {**state, ROWS: rows, **named_cache_directory(directory)}


def reset(table: Table, state: State, method: str = "auto") -> dict[str, Any]:
    """Flushes the cache, then clears its rows, counts and statistics.

    It takes the arguments of `populate` and raises the same errors.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=jax_tt.RowCache(100, ways=4))
    >>> state = table.init(jax.random.key(0))
    >>> _, state = jax_tt.lookup(table, state, jnp.array([7, 8]))
    >>> state = jax_tt.cache.reset(table, jax_tt.cache.populate(table, state))
    >>> jax_tt.cache.statistics(table, state)["occupied"]
    0
    """
    cached = cached_part(table)
    state = flush(cached, state, method)
    directory = cache_directory_of(state)
    sets, ways = directory.tags.shape
    buckets, room = directory.ghost_tags.shape
    directory = init_directory(sets, ways, buckets, room, directory.tags.dtype)
    everything = jnp.ones(directory.tags.size, bool)
    state = _with_rows(cached, state, everything, jnp.zeros_like(state[ROWS]))
    return {**state, **named_cache_directory(directory)}


def statistics(table: Table, state: State) -> dict[str, int | float]:
    """Totals of a row cache since it was created or reset. Blocks until the device is done.

    Args:
        table: a table with a row cache.
        state: its arrays by name.

    Returns:
        ``calls``: batches counted; ``requested``: ids in them; ``unique``: distinct ids, batch by batch;
        ``misses`` and ``unique_misses``: those that were not cached; ``conflict_unique_misses`` and
        ``conflict_misses``: misses that a refresh in the same step could not insert; ``refreshes``,
        ``inserted``, ``evicted``, ``written_back``: refreshes, and rows changed by them; ``hit_rate``: fraction of
        requests that were hits; ``occupied`` and ``occupancy``: number and fraction of slots in use.

    Raises:
        ValueError: the table has no row cache, or the state is not one of this table.

    >>> import jax, jax_tt
    >>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=jax_tt.RowCache(100, ways=4))
    >>> jax_tt.cache.statistics(table, table.init(jax.random.key(0)))["occupancy"]
    0.0
    """
    _checked(table, state)
    return cache_directory_of(state).statistics()


def written_back(
    cached: RowCachedTable, state: State, ids: jax.Array, method: str
) -> dict[str, Any]:
    """The state with rows ``ids[slots]`` written back into the cores; negative ids are skipped."""
    options = cached.cache.write_back
    assert options is not None
    table = cached.table
    seed = cache_directory_of(state).clock.astype(jnp.uint32)
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), seed)
    cores = write_back(table, table.spec.params(state), ids, state[ROWS], options, key, method)
    return {**state, **table.spec.named(cores)}


def _checked(table: Table, state: State) -> RowCachedTable:
    cached = cached_part(table)
    check_state(cached, state)
    return cached


def _read(cached: RowCachedTable, state: State, ids: jax.Array, method: str) -> jax.Array:
    """Rows ``[ids.size, D]`` in the accumulator type; 0 for negative ids."""
    cores = cached.table.spec.named(cached.table.spec.params(state))
    lookup = choose_execution(cached.table, cores, Lookup(bounds="unchecked", method=method)).lookup
    return cached.table.forward(cores, single_rows(ids.reshape(-1)), lookup)[0][:, 0]


def _with_rows(
    cached: RowCachedTable, state: State, chosen: jax.Array, new: jax.Array
) -> dict[str, Any]:
    """Replaces the chosen rows and, if they are fused, resets their optimizer state."""
    rows = jnp.where(chosen[:, None], new.astype(state[ROWS].dtype), state[ROWS])
    changed = {ROWS: rows}
    for name, initial in cached.slots.items():
        slot = state[name]
        changed[name] = jnp.where(chosen if slot.ndim == 1 else chosen[:, None], initial, slot)
    return {**state, **changed}
