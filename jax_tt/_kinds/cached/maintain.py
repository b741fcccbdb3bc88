"""Maintenance of the state of a `RowCachedTable` between steps; everything works under ``jit``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._kinds.cached.names import ROWS, directory_of, named_directory, outer_name
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._kinds.cached.write_back import single_rows, write_back
from jax_tt._lookup.rule import resolved
from jax_tt._native import cache_backend
from jax_tt._sets.cache_directory import add_to_statistics, init_directory
from jax_tt._sets.scores import aged
from jax_tt._table.change import maintain
from jax_tt._table.options import Lookup
from jax_tt._table.table import named
from jax_tt._table.types import State


def populated(cached: RowCachedTable, state: State, method: str) -> dict[str, Any]:
    """`jax_tt.populate_cache`."""
    before = directory_of(state)
    directory, evicted, counts = cache_backend.populate(before, method)
    directory = add_to_statistics(
        aged(directory, cached.cache.scoring),
        refreshes=1,
        inserted=counts[0],
        evicted=counts[1],
        conflict_unique_misses=counts[2],
        conflict_misses=counts[3],
    )
    if not cached.trains_rows:
        rows = _read(cached, state, directory.tags, method).astype(state[ROWS].dtype)
        return {**state, ROWS: rows, **named_directory(directory)}
    if cached.cache.write_back is not None:
        state = written_back(cached, state, evicted.reshape(-1), method)
        directory = add_to_statistics(directory, written_back=counts[1])
    came = directory.tags != before.tags
    new = _read(cached, state, jnp.where(came, directory.tags, -1), method)
    return {**_with_rows(cached, state, came.reshape(-1), new), **named_directory(directory)}


@maintain.register(RowCachedTable)
def refreshed_if_due(cached: RowCachedTable, state: State, method: str = "auto") -> dict[str, Any]:
    """`jax_tt.refresh_if_due`."""
    every = cached.cache.refresh_every
    if every is None:
        return dict(state)
    directory = directory_of(state)
    # Not clock % refresh_every: a step may count several batches or none.
    due = directory.clock - directory.refreshed >= every
    return jax.lax.cond(due, lambda state: populated(cached, state, method), dict, dict(state))


def flushed(cached: RowCachedTable, state: State, method: str) -> dict[str, Any]:
    """`jax_tt.flush_cache`."""
    directory = directory_of(state)
    tags = directory.tags
    if cached.trains_rows and cached.cache.write_back is not None:
        state = written_back(cached, state, tags.reshape(-1), method)
        directory = add_to_statistics(directory, written_back=jnp.sum(tags >= 0))
    # Rows stay cached and continue to train, so fused rows keep their optimizer state.
    rows = _read(cached, state, tags, method).astype(state[ROWS].dtype)
    return {**state, ROWS: rows, **named_directory(directory)}


def emptied(cached: RowCachedTable, state: State, method: str) -> dict[str, Any]:
    """`jax_tt.reset_cache`."""
    state = flushed(cached, state, method)
    directory = directory_of(state)
    sets, ways = directory.tags.shape
    buckets, room = directory.ghost_tags.shape
    directory = init_directory(sets, ways, buckets, room, directory.tags.dtype)
    everything = jnp.ones(directory.tags.size, bool)
    state = _with_rows(cached, state, everything, jnp.zeros_like(state[ROWS]))
    return {**state, **named_directory(directory)}


def written_back(
    cached: RowCachedTable, state: State, ids: jax.Array, method: str
) -> dict[str, Any]:
    """The state with rows ``ids[slots]`` written back into the cores; negative ids are skipped."""
    options = cached.cache.write_back
    assert options is not None
    table = cached.table
    seed = directory_of(state).clock.astype(jnp.uint32)
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), seed)
    cores = write_back(table, table.params(state), ids, state[ROWS], options, key, method)
    return {**state, **named(table, cores)}


def _read(cached: RowCachedTable, state: State, ids: jax.Array, method: str) -> jax.Array:
    """Rows ``[ids.size, D]`` in the accumulator type; 0 for negative ids."""
    cores = named(cached.table, cached.table.params(state))
    lookup = resolved(cached.table, cores, Lookup(bounds="unchecked", method=method))
    return cached.table.forward(cores, single_rows(ids.reshape(-1)), lookup)[0][:, 0]


def _with_rows(
    cached: RowCachedTable, state: State, chosen: jax.Array, new: jax.Array
) -> dict[str, Any]:
    """Replaces the chosen rows and, if they are fused, resets their optimizer state."""
    rows = jnp.where(chosen[:, None], new.astype(state[ROWS].dtype), state[ROWS])
    changed = {ROWS: rows}
    update = cached.rows_table.update
    for name, kind in zip(
        cached.rows_table.slot_names[0], update.optimizer.slots if update else (), strict=True
    ):
        slot = state[outer_name(name)]
        fresh = jnp.where(chosen if slot.ndim == 1 else chosen[:, None], kind.init, slot)
        changed[outer_name(name)] = fresh
    return {**state, **changed}
