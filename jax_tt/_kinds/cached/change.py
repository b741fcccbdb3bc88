"""What becomes of a table with a row cache that grows, is reordered, or gets another cache."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_tt._kinds.cached.names import ROWS, directory_of, outer_name
from jax_tt._kinds.cached.resize import moved, resized
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._sets.row_cache import RowCache
from jax_tt._table.change import Change, Growth, Orders, grow, reorder, restarted, with_cache
from jax_tt._table.table import SCALARS
from jax_tt._table.types import State


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
    return change._replace(table=table, carry={**change.carry, **carry})


@reorder.register(RowCachedTable)
def reordered(cached: RowCachedTable, state: State, orders: Orders) -> Change:
    """Fits the cores to the cached values of cached rows; the cache is empty afterwards."""
    if cached.trains_rows:
        tags = np.asarray(directory_of(state).tags).reshape(-1)
        orders = orders._replace(own=(tags, np.asarray(state[ROWS])))
    change = reorder(cached.table, state, orders)
    table = dataclasses.replace(cached, table=change.table)
    steps = {outer_name(name) for name in SCALARS}
    empty = {
        name: state[name] if name in steps else value
        for name, value in table.init_cache(change.found.cores[0].dtype).items()
    }
    carry = {**change.carry, ROWS: restarted}
    return change._replace(table=table, state=change.state | empty, carry=carry)


@with_cache.register(RowCachedTable)
def cached_anew(cached: RowCachedTable, state: State, cache: RowCache, method: str) -> Change:
    if cache is None:
        raise TypeError(
            "cache: got None; expected a RowCache. flush() writes back what rows learned."
        )
    table = dataclasses.replace(cached, cache=cache)
    return Change(table, *_resized(cached, state, cache, cached.num_embeddings, method))


def _resized(
    cached: RowCachedTable, state: State, cache: RowCache, num_embeddings: int, method: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    @jax.jit
    def changed(state: State) -> tuple[dict[str, Any], jax.Array]:
        return resized(cached, state, cache, method, num_embeddings)

    after, slots = changed(dict(state))
    return after, {ROWS: partial(moved, slots)}
