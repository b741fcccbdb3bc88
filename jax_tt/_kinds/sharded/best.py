"""The best rows of a sharded table for queries: the best of every device, and the best of these."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_tt._ids.placement import paged
from jax_tt._ids.split_ids import SplitIds
from jax_tt._kinds.sharded.move import pages_at, rows_at
from jax_tt._kinds.sharded.programs import Local
from jax_tt._kinds.sharded.sharding import PAGES, Sharding
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._lookup.best_rows import Queries, best_in_blocks, best_rows, in_order
from jax_tt._table.state import State


@best_rows.register(ShardedTable)
def best_of_devices(table: ShardedTable, state: State, queries: Queries) -> tuple[jax.Array, Any]:
    """`best_rows` of the rows of each device, and one all-gather of ``k`` rows per device."""
    if table.layout.columns > 1:  # no device has whole rows
        return best_in_blocks(table, state, queries)
    specs = {name: table._spec_of(name) for name in state}
    local = Local(_best_on_device, (table.sharding, table.num_embeddings))
    scores, *words = table.group.on_devices(local, (specs, P()), P())(dict(state), queries)
    if not table.ids.takes_keys:
        return scores, words[0].astype(jnp.int32)
    return scores, SplitIds(lax.bitcast_convert_type(jnp.stack(words, -1), jnp.int32))


def _best_on_device(
    sharding: Sharding, num_embeddings: int, state: State, queries: Queries
) -> list[jax.Array]:
    """The best scores of all devices and the words of their ids, which are equal on all devices."""
    if sharding.ids.takes_keys:
        scores, keys = best_rows(sharding.shard, state, queries)
        ids = keys.digits
    else:
        scores, ids = _best_ids(sharding, num_embeddings, state, queries)
    bits = lax.bitcast_convert_type(scores, jnp.int32).reshape(*scores.shape, -1)
    ids = ids.reshape(*scores.shape, -1)
    every = lax.all_gather(jnp.concatenate([bits, ids], -1), sharding.axes, axis=1, tiled=True)
    bits, ids = every[..., : bits.shape[-1]], every[..., bits.shape[-1] :]
    scores = lax.bitcast_convert_type(
        bits.reshape(*bits.shape[:2], *([] if bits.shape[-1] == 1 else [2])), scores.dtype
    )
    words = lax.bitcast_convert_type(ids, jnp.uint32)
    return in_order(scores, [words[..., k] for k in range(words.shape[-1])], queries.k)


def _best_ids(
    sharding: Sharding, num_embeddings: int, state: State, queries: Queries
) -> tuple[jax.Array, jax.Array]:
    """The best rows of this device, of pages that it has the first replica of."""
    layout, pages = sharding.layout, state[PAGES][:, :1]
    page_at, device = pages_at(layout, pages), lax.axis_index(sharding.axes).astype(jnp.int32)
    page, row, _ = paged(layout, jnp.maximum(queries.exclude, 0))
    place = pages[page, 0]
    here = (queries.exclude >= 0) & (place // layout.pool == device)
    exclude = jnp.where(here, place % layout.pool * layout.page_size + row, -1)
    _, present = rows_at(layout, page_at, device, lax.iota(jnp.int32, layout.rows), num_embeddings)
    queries = dataclasses.replace(queries, exclude=exclude, present=present)
    # The places of a device are in the order of ids, so that those of equal scores are too.
    scores, places = best_rows(sharding.shard, state, queries)
    ids, _ = rows_at(layout, page_at, device, jnp.maximum(places, 0), num_embeddings)
    return scores, jnp.where(places < 0, -1, ids)
