"""Lookups of one device in the pages of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._dtypes import accumulator
from jax_tt._lookup import _groups
from jax_tt._lookup._batch import Batch
from jax_tt._lookup._groups import Call, Use
from jax_tt._sharding.exchange import exchanged, over_rounds
from jax_tt._sharding.requests import PAGES, Requests, requests_of, sharded
from jax_tt._sharding.route import in_rounds, leading_bits, message_rows
from jax_tt._tables.dense import DenseTable
from jax_tt._tables.options import Lookup, Wanted
from jax_tt._tables.table import State

_TABLE = frozenset({"embedding"})


class Residuals(NamedTuple):
    """What the backward pass of one device needs.

    Attributes:
        requests: of every table.
        bits: that told the rounds apart, ``[1]``.
        pooled: residuals of the sums of the rows that this device has got.
        read: residuals of the rows that it has sent.
        rows: of every table that this device has got, where gradients of weights need them; else None.
    """

    requests: list[Requests]
    bits: jax.Array
    pooled: Any
    read: Any
    rows: list[jax.Array | None]


def local_forward(
    calls: Sequence[Call], axes: tuple[str, ...], others: tuple[str, ...]
) -> tuple[list[jax.Array], Residuals]:
    """Sums ``[S, nb, D]`` of every call for the batch of this device."""
    requests = [
        requests_of(sharded(call), call.state[PAGES], call.batch, call.use.lookup, axes)
        for call in calls
    ]
    rows, bits, read = _rows(calls, requests, axes, others)
    pools = [
        pool_call(call, own, table) for call, own, table in zip(calls, requests, rows, strict=True)
    ]
    sums, pooled = _groups.forward(pools, None)
    kept = [
        own if call.use.lookup.wanted.weights else None
        for call, own in zip(calls, rows, strict=True)
    ]
    return list(sums), Residuals(requests, bits[None], pooled, read, kept)


def _rows(
    calls: Sequence[Call], requests: Sequence[Requests], axes: Any, others: Any
) -> tuple[list[jax.Array], jax.Array, Any]:
    """The different rows ``[n + 1, D]`` of every table, the last one for ids without a row."""
    routes = [own.distinct.route for own in requests]
    devices = sharded(calls[0]).layout.devices
    sizes = [message_rows(route.row.shape[0], devices) for route in routes]
    needed = [leading_bits(*pair, devices) for pair in zip(routes, sizes, strict=True)]
    bits = lax.pmax(jnp.max(jnp.stack(needed)), (*axes, *others))
    places = [
        in_rounds(route, bits, size, devices) for route, size in zip(routes, sizes, strict=True)
    ]

    def turn(k: jax.Array, carry: Any) -> Any:
        rows, _ = carry
        sent = []
        for route, size, (own, place) in zip(routes, sizes, places, strict=True):
            place = jnp.where(own == k, place, devices * size)
            message = jnp.full(devices * size, -1, jnp.int32)
            message = message.at[place].set(route.row, mode="drop", unique_indices=True)
            sent.append(message.reshape(devices, size))
        asked = exchanged(sent, axes)
        reads = [read_call(call, part.reshape(-1)) for call, part in zip(calls, asked, strict=True)]
        sums, read = _groups.forward(reads, None)
        found = exchanged([part.reshape(devices, -1, part.shape[-1]) for part in sums], axes)
        new = []
        for table, answer, (own, place) in zip(rows, found, places, strict=True):
            flat = answer.reshape(-1, answer.shape[-1])
            got = flat.at[place].get(mode="fill", fill_value=0)
            new.append(table.at[:-1].set(jnp.where((own == k)[:, None], got, table[:-1])))
        return new, read

    def shapes() -> Any:
        reads = [
            read_call(call, jnp.zeros(devices * size, jnp.int32))
            for call, size in zip(calls, sizes, strict=True)
        ]
        return _groups.forward(reads, None)[1]

    read = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(shapes))
    rows, read = over_rounds(
        turn, bits, ([_no_rows(call, own) for call, own in zip(calls, requests, strict=True)], read)
    )
    return rows, bits, read


def _no_rows(call: Call, requests: Requests) -> jax.Array:
    table, (count,) = call.use.table, requests.distinct.route.row.shape
    accum = accumulator(table.storage(call.state))
    rows = jnp.zeros((count + 1, table.features), accum)
    return rows.at[-1].set(jnp.nan) if call.use.lookup.bounds == "error" else rows


def pool_call(call: Call, requests: Requests, rows: jax.Array | None) -> Call:
    """The lookup of the batch in the rows that this device has got; without them, for gradients of rows alone."""
    (count,) = requests.distinct.route.row.shape
    table, lookup = call.use.table, call.use.lookup
    accum = accumulator(table.storage(call.state))
    wanted = Wanted(_TABLE if lookup.wanted.names else frozenset(), lookup.wanted.weights)
    if rows is None:
        rows = jnp.zeros((count + 1, table.features), accum)
    described = DenseTable(count + 1, table.features, accum, name=table.name)
    return Call(Use(described, inner(lookup, wanted)), {"embedding": rows}, requests.pooled, ())


def read_call(call: Call, rows: jax.Array, state: State | None = None) -> Call:
    """The lookup, or the step, of rows ``[n]`` of this device, -1 for none."""
    table, lookup = sharded(call).local, call.use.lookup
    count = rows.shape[0]
    ends = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (count, 2))
    batch = Batch(rows[:, None], ends, None, padded=True, rectangular=True)
    wanted = Wanted(lookup.wanted.names)
    return Call(
        Use(table, inner(lookup, wanted)),
        call.state if state is None else state,
        batch,
        call.values,
    )


def inner(lookup: Lookup, wanted: Wanted) -> Lookup:
    """Options for rows that are known to exist."""
    return dataclasses.replace(
        lookup, combiner="sum", bounds="zero", dtype=None, axis_name=None, wanted=wanted
    )
