"""What a device is asked for by the others: rows, or keys of which it looks for the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._native import hash_backend
from jax_tt._sets.missing import Check, check_count
from jax_tt._sets.owners import keys_of_words
from jax_tt._table.groups import Call


class Asked(NamedTuple):
    """Rows of this device that others ask for.

    Attributes:
        rows: int32 ``[devices * size]``, -1 for none.
        words: by which rounds are told apart: the rows themselves, or the first words of keys.
    """

    rows: jax.Array
    words: jax.Array


class AskedKeys(NamedTuple):
    """Keys that others ask for.

    Attributes:
        keys: uint32 ``[devices * size, 2]``.
        here: which of them are keys.
        words: the first word that each has travelled as.
    """

    keys: jax.Array
    here: jax.Array
    words: jax.Array


def received_keys(parts: Iterator[jax.Array]) -> AskedKeys:
    """The keys of messages of `Route.message`."""
    first, rest, count = (next(parts) for _ in range(3))
    here = lax.broadcasted_iota(jnp.int32, first.shape, 1) < count
    words = first.reshape(-1)
    return AskedKeys(keys_of_words(words, rest.reshape(-1)), here.reshape(-1), words)


def received(
    call: Call, parts: Iterator[jax.Array], allowed: Any, *, checked: bool
) -> tuple[Asked, AskedKeys | None]:
    """The rows that the others ask for in messages of `Route.message`, and the keys that they are of.

    Nothing that is not allowed is asked for. If it is ``checked``, missing keys of a training batch are warned of.
    """
    if not sharding_of(call).ids.takes_keys:
        rows = next(parts).reshape(-1)
        return Asked(jnp.where(allowed, rows, -1), rows), None
    asked = received_keys(parts)
    asked = asked._replace(here=asked.here & allowed)
    table, lookup = sharding_of(call).shard, call.use.lookup
    # A lookup that raised on one device alone would leave the others waiting.
    warns = checked and lookup.train and table.safe_check == "warn"
    search = table.search_of(
        call.state, asked.keys, asked.here, dataclasses.replace(lookup, train=warns)
    )
    search = search._replace(absent=-1)
    (slots,) = hash_backend.find_many([search], [lookup.method])
    return Asked(slots, asked.words), asked


def with_missing(call: Call, asked: Asked, keys: AskedKeys | None, sums: jax.Array) -> jax.Array:
    """The sums ``[n, 1, D]`` of rows, and the initial values of keys that have no row."""
    if keys is None:
        return sums
    table, lookup = sharding_of(call).shard, call.use.lookup
    missing = keys.here & (asked.rows < 0)
    if table.trains(lookup) and table.safe_check == "error":
        everywhere = sharding_of(call).everywhere
        count = lax.psum(jnp.sum(missing, dtype=jnp.int32), everywhere)
        check_count(Check("error", table.untrained), count)
    if not table.adds_rows(lookup):
        return sums

    def added(sums: jax.Array) -> jax.Array:
        storage = table.storage(call.state)
        rows = table.initial(call.state, keys.keys, missing, storage, lookup.method)
        rows = rows.reshape(sums.shape).astype(sums.dtype)
        return jnp.where(missing.reshape(-1, *[1] * (sums.ndim - 1)), rows, sums)

    return lax.cond(jnp.any(missing), added, lambda sums: sums, sums)
