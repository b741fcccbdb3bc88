"""The lookups that one device makes: of rows that it holds, for itself and the others, and of rows that it received."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._directories.hash_directory import Check, check_count
from jax_tt._directories.hashing import keys_of_words
from jax_tt._ids.batch import Batch, single_rows
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._native import hash_backend
from jax_tt._native.rows import RowTable
from jax_tt._table.added import adds_rows
from jax_tt._table.groups import BoundTable, Call
from jax_tt._table.options import Lookup, NeededCotangents
from jax_tt._table.state import State

_TABLE = frozenset({"embedding"})


class Asked(NamedTuple):
    """Rows of this device that others ask for, int32 ``[devices * size]``, -1 for none.

    Rounds are told apart by ``words``: the rows themselves, or the first words of keys.
    """

    rows: jax.Array
    words: jax.Array


class AskedKeys(NamedTuple):
    """Keys that others ask for, uint32 ``[devices * size, 2]``, which of them are ``here``, and their first words."""

    keys: jax.Array
    here: jax.Array
    words: jax.Array


def received_keys(parts: Iterator[jax.Array]) -> AskedKeys:
    """Reads the keys of messages of `Route.message`."""
    first, rest, count = (next(parts) for _ in range(3))
    here = lax.broadcasted_iota(jnp.int32, first.shape, 1) < count
    words = first.reshape(-1)
    return AskedKeys(keys_of_words(words, rest.reshape(-1)), here.reshape(-1), words)


def received_rows(
    call: Call, parts: Iterator[jax.Array], allowed: Any, *, checked: bool
) -> tuple[Asked, AskedKeys | None]:
    """Reads the rows that others ask for from messages of `Route.message`; finds them by their keys in hash tables.

    Nothing is asked for where ``allowed`` is False. If ``checked``, missing keys of a training batch are warned of.
    """
    if not sharding_of(call).ids.takes_keys:
        rows = next(parts).reshape(-1)
        return Asked(jnp.where(allowed, rows, -1), rows), None
    asked = received_keys(parts)
    asked = asked._replace(here=asked.here & allowed)
    table, lookup = sharding_of(call).shard, call.use.lookup
    # A lookup that raised on one device alone would leave the others waiting.
    warns = checked and table.trains(lookup) and table.safe_check == "warn"
    search = table.search_of(call.state, asked.keys, asked.here, lookup.replace(train=warns))
    search = search._replace(absent=-1)
    (slots,) = hash_backend.find_many([search], [lookup.method])
    return Asked(slots, asked.words), asked


def with_missing(call: Call, asked: Asked, keys: AskedKeys | None, sums: jax.Array) -> jax.Array:
    """Replaces the sums ``[n, 1, D]`` of keys without a row by their initial values."""
    if keys is None:
        return sums
    table, lookup = sharding_of(call).shard, call.use.lookup
    missing = keys.here & (asked.rows < 0)
    if table.trains(lookup) and table.safe_check == "error":
        everywhere = sharding_of(call).everywhere
        count = lax.psum(jnp.sum(missing, dtype=jnp.int32), everywhere)
        check_count(Check("error", table.untrained), count)
    if not adds_rows(table, lookup):
        return sums

    def added(sums: jax.Array) -> jax.Array:
        storage = table.spec.storage(call.state)
        rows = table.initial(call.state, keys.keys, missing, storage, lookup.method)
        rows = rows.reshape(sums.shape).astype(sums.dtype)
        return jnp.where(missing.reshape(-1, *[1] * (sums.ndim - 1)), rows, sums)

    return lax.cond(jnp.any(missing), added, lambda sums: sums, sums)


def received_call(call: Call, batch: Batch, rows: jax.Array) -> Call:
    """The lookup of a batch whose ids are positions in ``rows``, which this device received."""
    table, lookup = call.use.table, call.use.lookup
    if lookup.bounds == "error":
        rows = jnp.concatenate([rows, jnp.full_like(rows[:1], jnp.nan)])
    wanted = NeededCotangents(_TABLE if lookup.wanted.names else frozenset(), lookup.wanted.weights)
    count, width = rows.shape
    described = RowTable(count, width, rows.dtype, name=table.name)
    state = {"embedding": rows}
    return Call(_use(described, lookup, wanted, state), state, batch, ())


def rows_call(call: Call, rows: jax.Array, state: State | None = None) -> Call:
    """The lookup, or the step, of rows ``[n]`` of this device, -1 for none."""
    return batch_call(call, single_rows(rows), state)


def asked_call(call: Call, asked: Asked | Batch) -> Call:
    """The lookup of what others ask for: rows, or bags of them."""
    return batch_call(call, asked) if isinstance(asked, Batch) else rows_call(call, asked.rows)


def batch_call(call: Call, batch: Batch, state: State | None = None) -> Call:
    """The lookup, or the step, of a batch of rows of this device."""
    lookup = call.use.lookup
    weights = lookup.wanted.weights and batch.weights is not None
    wanted = NeededCotangents(lookup.wanted.names, weights)
    state = call.state if state is None else state
    use = _use(sharding_of(call).rows, lookup, wanted, state)
    return Call(use, state, batch, call.values)


def _use(table: Any, lookup: Lookup, wanted: NeededCotangents, state: State) -> BoundTable:
    """A lookup of rows that are known to exist, which native operations join with others."""
    lookup = dataclasses.replace(
        lookup, combiner="sum", bounds="zero", dtype=None, axis_name=None, wanted=wanted
    )
    return BoundTable(table, lookup, table.execution(lookup, state))
