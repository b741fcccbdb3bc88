"""Lookups of the rows that one device has, and of those that it has got from the others."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._native.rows import RowTable
from jax_tt._table.groups import Call, Use
from jax_tt._table.options import Lookup, Wanted
from jax_tt._table.types import State

_TABLE = frozenset({"embedding"})


def pool_call(call: Call, batch: Batch, rows: jax.Array) -> Call:
    """The lookup of a batch whose ids are places of rows that this device has got."""
    table, lookup = call.use.table, call.use.lookup
    if lookup.bounds == "error":
        rows = jnp.concatenate([rows, jnp.full_like(rows[:1], jnp.nan)])
    wanted = Wanted(_TABLE if lookup.wanted.names else frozenset(), lookup.wanted.weights)
    count, width = rows.shape
    described = RowTable(count, width, rows.dtype, name=table.name)
    return Call(Use(described, inner(lookup, wanted)), {"embedding": rows}, batch, ())


def read_call(call: Call, rows: jax.Array, state: State | None = None) -> Call:
    """The lookup, or the step, of rows ``[n]`` of this device, -1 for none."""
    count = rows.shape[0]
    ends = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (count, 2))
    batch = Batch(rows[:, None], ends, None, padded=True, rectangular=True)
    return own_call(call, batch, state)


def own_call(call: Call, batch: Batch, state: State | None = None) -> Call:
    """The lookup, or the step, of a batch of rows of this device."""
    lookup = call.use.lookup
    weights = lookup.wanted.weights and batch.weights is not None
    use = Use(sharding_of(call).rows, inner(lookup, Wanted(lookup.wanted.names, weights)))
    return Call(use, call.state if state is None else state, batch, call.values)


def inner(lookup: Lookup, wanted: Wanted) -> Lookup:
    """Options for rows that are known to exist."""
    return dataclasses.replace(
        lookup, combiner="sum", bounds="zero", dtype=None, axis_name=None, wanted=wanted
    )
