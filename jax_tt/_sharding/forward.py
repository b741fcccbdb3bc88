"""Lookups of one device in the pages of all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._dtypes import accumulator
from jax_tt._lookup import _groups
from jax_tt._lookup._batch import Batch
from jax_tt._lookup._groups import Call, Use
from jax_tt._sharding.asked import Asked, received, with_missing
from jax_tt._sharding.columns import in_columns, joined_columns
from jax_tt._sharding.exchange import exchanged, other_rounds, unless
from jax_tt._sharding.requests import PAGES, Requests, requests_of, sharded
from jax_tt._sharding.route import (
    Messages,
    Route,
    kept_places,
    leading_bits,
    message_rows,
    messages_of,
)
from jax_tt._tables.dense import DenseTable
from jax_tt._tables.options import Lookup, Wanted
from jax_tt._tables.table import State

_TABLE = frozenset({"embedding"})


class Residuals(NamedTuple):
    """What the backward pass of one device needs.

    Attributes:
        requests: of every table.
        fits: whether the messages hold all of them, ``[1]``; None if they are large enough in any case.
        attempt: with messages of the expected size.
    """

    requests: list[Requests]
    fits: jax.Array | None
    attempt: Attempt


class Attempt(NamedTuple):
    """A lookup with messages of some size.

    Attributes:
        requests: of every table.
        messages: of every table.
        bits: that tell the rounds apart, ``[1]``; None if there is one round.
        kept: where the different rows of every table are kept.
        rows: of every table that this device has got.
        batches: of every table, with ids that are places of rows.
        pooled: residuals of the sums of these rows.
        asked: what this device was asked for in the first round.
        read: residuals of their lookup.
    """

    requests: list[Requests]
    messages: list[Messages]
    bits: jax.Array | None
    kept: list[jax.Array]
    rows: list[jax.Array]
    batches: list[Batch]
    pooled: Any
    asked: list[Asked]
    read: Any


def local_forward(
    calls: Sequence[Call], axes: tuple[str, ...], others: tuple[str, ...]
) -> tuple[list[jax.Array], Residuals]:
    """Sums ``[S, nb, D]`` of every call for the batch of this device."""
    calls = [in_columns(call) for call in calls]
    requests = [
        requests_of(sharded(call), call.state[PAGES], call.batch, call.use.lookup, axes)
        for call in calls
    ]
    everywhere = (*axes, *others)
    if all(sharded(call).exchange.expected_unique == 1 for call in calls):
        sums, attempt = attempted(calls, requests, axes, others)
        fits = None
    else:
        first, fits = _if_they_fit(calls, requests, everywhere)
        found = attempted(calls, first, axes, others, one_round=True)
        sums = unless(fits, lambda _: attempted(calls, requests, axes, others)[0], found[0])
        attempt, fits = found[1], fits[None]
    sums = [joined_columns(call, own) for call, own in zip(calls, sums, strict=True)]
    return sums, Residuals(requests, fits, attempt)


def attempted(
    calls: Sequence[Call],
    requests: Sequence[Requests],
    axes: tuple[str, ...],
    others: tuple[str, ...],
    one_round: bool = False,
) -> tuple[list[jax.Array], Attempt]:
    """Sums of every call, in one round of messages of the expected size, or in as many as it takes."""
    devices = sharded(calls[0]).layout.devices
    routes = [own.distinct.route for own in requests]
    if one_round:
        bits, sizes = None, _expected_sizes(calls, requests)
        pairs = zip(routes, sizes, strict=True)
        messages = [messages_of(route, bits, size, devices) for route, size in pairs]
        kept = [own.place for own in messages]
    else:
        sizes = [message_rows(route.row.shape[0], devices) for route in routes]
        messages, bits = all_messages(routes, sizes, devices, (*axes, *others))
        kept = [kept_places(own, bits, devices) for own in messages]
    rows, asked, read = _rows(calls, requests, messages, (bits, kept), (axes, others))
    batches = [_pooled_batch(*parts) for parts in zip(calls, requests, kept, messages, strict=True)]
    pools = [pool_call(*parts) for parts in zip(calls, batches, rows, strict=True)]
    sums, pooled = _groups.forward(pools, None)
    bits = None if bits is None else bits[None]
    own = Attempt(list(requests), messages, bits, kept, rows, batches, pooled, asked, read)
    return list(sums), own


def all_messages(
    routes: Sequence[Route],
    sizes: Sequence[int],
    devices: int,
    everywhere: Any,
    least: jax.Array | None = None,
) -> tuple[list[Messages], jax.Array]:
    """The messages for all routes, and the number of bits, ``least`` or more, that tell rounds apart on all devices."""
    bits = _bits(routes, sizes, devices, everywhere, least)
    pairs = zip(routes, sizes, strict=True)
    return [messages_of(route, bits, size, devices) for route, size in pairs], bits


def _bits(
    routes: Sequence[Route],
    sizes: Sequence[int],
    devices: int,
    everywhere: Any,
    least: jax.Array | None = None,
) -> jax.Array:
    needed = [leading_bits(*pair, devices) for pair in zip(routes, sizes, strict=True)]
    needed += [] if least is None else [least]
    return lax.pmax(jnp.max(jnp.stack(needed)), everywhere)


def _expected_sizes(calls: Sequence[Call], requests: Sequence[Requests]) -> list[int]:
    """The rows of a message of every table, by the share of different ids that its user expects."""
    sizes = []
    for call, own in zip(calls, requests, strict=True):
        table = sharded(call)
        expected = math.ceil(own.distinct.source.shape[0] * table.exchange.expected_unique)
        sizes.append(message_rows(expected, table.layout.devices))
    return sizes


def _if_they_fit(
    calls: Sequence[Call], requests: Sequence[Requests], everywhere: Any
) -> tuple[list[Requests], jax.Array]:
    """The requests, or none if messages of the expected sizes do not hold those of all devices; and which it is."""
    devices = sharded(calls[0]).layout.devices
    routes = [own.distinct.route for own in requests]
    fits = _bits(routes, _expected_sizes(calls, requests), devices, everywhere) == 0
    return [own.only_if(fits, devices) for own in requests], fits


def _rows(
    calls: Sequence[Call],
    requests: Sequence[Requests],
    messages: Sequence[Messages],
    kept: tuple[jax.Array | None, Sequence[jax.Array]],
    mesh_axes: tuple[tuple[str, ...], tuple[str, ...]],
) -> tuple[list[jax.Array], list[Asked], Any]:
    """The different rows of every table where they are kept, those asked for in the first round, and residuals."""
    (bits, places), (axes, others) = kept, mesh_axes
    devices = sharded(calls[0]).layout.devices

    def got(k: Any) -> tuple[list[jax.Array], list[Asked], Any]:
        sent = []
        for own, table in zip(requests, messages, strict=True):
            sent += own.distinct.route.message(table, k, devices, np.True_)
        parts = iter(exchanged(sent, axes))
        found = [received(call, parts, checked=True) for call in calls]
        asked = [own for own, _ in found]
        reads = [read_call(call, own.rows) for call, own in zip(calls, asked, strict=True)]
        sums, read = _groups.forward(reads, None)
        sums = [
            with_missing(call, *own, sum_, (*axes, *others))
            for call, own, sum_ in zip(calls, found, sums, strict=True)
        ]
        found = exchanged(
            [_sent_rows(*pair, devices) for pair in zip(calls, sums, strict=True)], axes
        )
        return [_received_rows(*pair) for pair in zip(calls, found, strict=True)], asked, read

    def other(k: jax.Array, carry: Any) -> Any:
        found, _, read = got(k)
        rows = []
        for table, own, place, more in zip(carry[0], messages, places, found, strict=True):
            number = own.sent(k, devices)
            at = place.at[number].get(mode="fill", fill_value=table.shape[0])
            rows.append(table.at[at].set(more, mode="drop"))
        return rows, read

    rows, asked, read = got(0)
    rows, read = other_rounds(other, bits, (rows, read))
    return rows, asked, read


def _sent_rows(call: Call, sums: jax.Array, devices: int) -> jax.Array:
    storage = sharded(call).storage(call.state)
    kind = sharded(call).exchange.type_of_rows(storage, sums.dtype)
    return sums.astype(kind).reshape(devices, -1, sums.shape[-1])


def _received_rows(call: Call, rows: jax.Array) -> jax.Array:
    accum = accumulator(sharded(call).storage(call.state))
    # Sums of 16-bit rows are in float32.
    kind = accum if accum == jnp.float64 else rows.dtype
    return rows.reshape(-1, rows.shape[-1]).astype(kind)


def _pooled_batch(call: Call, requests: Requests, kept: jax.Array, messages: Messages) -> Batch:
    """The batch with the places of its rows as ids; that of the row after all of them for ids without a row."""
    total = messages.size * sharded(call).layout.devices
    ids = jnp.where(requests.read, kept[requests.distinct.places], total)
    ids = jnp.where(requests.here, ids.reshape(requests.here.shape), -1)
    return dataclasses.replace(call.batch, ids=ids, slots=None)


def pool_call(call: Call, batch: Batch, rows: jax.Array) -> Call:
    """The lookup of a batch of `_pooled_batch` in rows."""
    table, lookup = call.use.table, call.use.lookup
    if lookup.bounds == "error":
        rows = jnp.concatenate([rows, jnp.full_like(rows[:1], jnp.nan)])
    wanted = Wanted(_TABLE if lookup.wanted.names else frozenset(), lookup.wanted.weights)
    count, width = rows.shape
    described = DenseTable(count, width, rows.dtype, name=table.name)
    return Call(Use(described, inner(lookup, wanted)), {"embedding": rows}, batch, ())


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
