"""Changes of a table with a row cache: it grows, is reordered, or gets another cache."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_tt._kinds.cached.names import ROWS, directory_of, outer_name
from jax_tt._kinds.cached.resize import moved, resized
from jax_tt._kinds.cached.table import RowCachedTable, cached_part
from jax_tt._sets.row_cache import RowCache
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
from jax_tt._table.copies import register_wrapper
from jax_tt._table.state import SCALARS
from jax_tt._table.table import Table
from jax_tt._table.types import State

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
        state, carry = _resized(cached, state, cache, growth.num_embeddings, growth.method)
    change = grow(cached.table, state, growth)
    table = dataclasses.replace(cached, table=change.table)
    return dataclasses.replace(change, table=table, carry={**change.carry, **carry})


@reorder.register(RowCachedTable)
def reordered(cached: RowCachedTable, state: State, orders: Orders) -> Change:
    """Fits the cores to the cached values of cached rows; the cache is empty afterwards."""
    if cached.trains_rows:
        tags = np.asarray(directory_of(state).tags).reshape(-1)
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
        raise TypeError(
            "cache: got None; expected a RowCache. flush() writes back what rows learned."
        )
    table = dataclasses.replace(cached, cache=cache)
    return Change(table, *_resized(cached, state, cache, cached.num_embeddings, method))


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


def _resized(
    cached: RowCachedTable, state: State, cache: RowCache, num_embeddings: int, method: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    @jax.jit
    def changed(state: State) -> tuple[dict[str, Any], jax.Array]:
        return resized(cached, state, cache, method, num_embeddings)

    after, slots = changed(dict(state))
    return after, {ROWS: partial(moved, slots)}
