"""The best keys of a hash table for queries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ids.split_ids import SplitIds
from jax_tt._kinds.hashed.table import HashTable
from jax_tt._lookup.best_rows import Queries, best_rows, in_order
from jax_tt._native import hash_backend
from jax_tt._sets.hash_directory import directory_of
from jax_tt._table.options import Lookup
from jax_tt._table.types import State


@best_rows.register(HashTable)
def best_keys(table: HashTable, state: State, queries: Queries) -> tuple[jax.Array, SplitIds]:
    """`best_rows` with keys for ids, unsigned ones in ascending order among equal scores."""
    directory = directory_of(state)
    inner = dataclasses.replace(
        queries,
        exclude=_slots(table, state, queries),
        present=directory.touched.reshape(-1) > 0,
    )
    scores, slots = best_rows(table.table, state, inner)
    found = jnp.maximum(slots, 0)
    words = directory.keys[found // table.ways, :, found % table.ways]
    words = jnp.where(slots[..., None] < 0, jnp.uint32(2**32 - 1), words)
    scores, high, low = in_order(scores, [words[..., 0], words[..., 1]], queries.k)
    return scores, SplitIds(lax.bitcast_convert_type(jnp.stack([high, low], -1), jnp.int32))


def _slots(table: HashTable, state: State, queries: Queries) -> jax.Array:
    """The slots of excluded keys, -1 for those that have none."""
    digits = queries.exclude.reshape(-1, 3)
    keys = lax.bitcast_convert_type(digits[:, 1:], jnp.uint32)
    search = table.search_of(state, keys, digits[:, 0] >= 0, Lookup(train=False))
    (slots,) = hash_backend.find_many([search._replace(absent=-1)], [queries.method])
    return slots.reshape(queries.exclude.shape[:2])
