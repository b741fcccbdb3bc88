"""Lookups of one device in the pages of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._kinds.sharded.asked import Asked, AskedKeys, received, with_missing
from jax_tt._kinds.sharded.columns import in_columns, joined_columns
from jax_tt._kinds.sharded.exchange import exchanged, other_rounds, sums_of, unless
from jax_tt._kinds.sharded.reads import own_call, pool_call, read_call
from jax_tt._kinds.sharded.requests import Requests, requests_of
from jax_tt._kinds.sharded.route import (
    Messages,
    Route,
    kept_places,
    leading_bits,
    message_rows,
    messages_of,
)
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._kinds.sharded.spread import (
    Spread,
    emptied,
    partial_sums,
    received_bags,
    spread_of,
    whole_sums,
)
from jax_tt._kinds.sharded.travels import message_of, rows_of_expected_message, sums_travel
from jax_tt._table import groups
from jax_tt._table.groups import Call

# What a device asks of the others for a table: different rows, or sums of the rows of bags.
Ask = Requests | Spread


class Residuals(NamedTuple):
    """What the backward pass of one device needs.

    Attributes:
        fits: whether the messages hold all requests, ``[1]``, known after the last attempt; None if they are large
            enough in any case.
        attempt: with messages of the expected size.
    """

    fits: jax.Array | None
    attempt: Attempt


class Fetched(NamedTuple):
    """The different rows of a batch, which this device has got.

    Attributes:
        messages: that they were asked for in.
        kept: where they are kept.
        rows: ``[n, D]``.
        batch: with ids that are places of rows.
    """

    messages: Messages
    kept: jax.Array
    rows: jax.Array
    batch: Batch


class Attempt(NamedTuple):
    """A lookup with messages of some size.

    Attributes:
        asks: of every table.
        bits: that tell the rounds apart, ``[1]``; None if there is one round.
        fetched: of every table; None where sums have travelled.
        pooled: residuals of the sums of fetched rows.
        asked: of every table, what this device was asked for in the first round: rows, or bags of them.
        read: residuals of their lookup.
        fits: whether messages of the expected sizes hold what all devices ask for, ``[1]``; None if there are rounds.
    """

    asks: list[Ask]
    bits: jax.Array | None
    fetched: list[Fetched | None]
    pooled: Any
    asked: list[Asked | Batch]
    read: Any
    fits: jax.Array | None


def local_forward(calls: Sequence[Call]) -> tuple[list[jax.Array], Residuals]:
    """Sums ``[S, nb, D]`` of every call for the batch of this device."""
    calls = [in_columns(call) for call in calls]
    summed = [sums_travel(call) for call in calls]
    usual = all(sharding_of(call).exchange.expects_nothing for call in calls)
    if usual and not any(summed):
        sums, attempt = attempted(calls, all_requests(calls))
        fits = None
    else:
        first, missing = _in_messages_of_expected_sizes(calls, summed)
        found = attempted(calls, first, missing)
        fits = found[1].fits
        assert fits is not None

        def again(_: Any, batches: Sequence[Batch]) -> list[jax.Array]:
            present = with_batches(calls, batches)
            return attempted(present, all_requests(present))[0]

        sums, fits = unless(fits[0], again, found[0], [call.batch for call in calls])
        attempt, fits = found[1], fits[None]
    sums = [joined_columns(call, own) for call, own in zip(calls, sums, strict=True)]
    return sums, Residuals(fits, attempt)


def with_batches(calls: Sequence[Call], batches: Sequence[Batch]) -> list[Call]:
    """The calls for other batches."""
    return [call._replace(batch=batch) for call, batch in zip(calls, batches, strict=True)]


def all_requests(calls: Sequence[Call]) -> list[Requests]:
    """The different rows that this device's part of every batch reads."""
    return [requests_of(call) for call in calls]


def attempted(
    calls: Sequence[Call],
    asks: Sequence[Ask],
    missing: jax.Array | None = None,
) -> tuple[list[jax.Array], Attempt]:
    """Sums of every call, in as many rounds as it takes.

    With ``missing``, 0 or less if messages of the expected sizes hold what this device asks for: in one round of such
    messages. If those of one device do not hold it, sums have no meaning, and nothing is asked for.
    """
    sharding = sharding_of(calls[0])
    devices = sharding.layout.devices
    requests = {k: own for k, own in enumerate(asks) if isinstance(own, Requests)}
    routes = [own.distinct.route for own in requests.values()]
    if missing is not None:
        bits = None
        sizes = [_expected_size(calls[k], own) for k, own in requests.items()]
        pairs = zip(routes, sizes, strict=True)
        messages = [messages_of(route, bits, size, devices) for route, size in pairs]
        kept = [own.place for own in messages]
    else:
        sizes = [message_rows(route.row.shape[0], devices) for route in routes]
        messages, bits = all_messages(routes, sizes, devices, sharding.everywhere)
        kept = [kept_places(own, bits, devices) for own in messages]
    ways = dict(zip(requests, zip(messages, kept, strict=True), strict=True))
    answers, asked, read, fits = _answers(calls, asks, ways, bits, missing)
    if fits is not None:
        asks = [own.only_if(fits) for own in asks]
        fits = fits[None]
    fetched: list[Fetched | None] = [None] * len(calls)
    pools = []
    for k, own in requests.items():
        batch = _pooled_batch(calls[k], own, *ways[k])
        fetched[k] = Fetched(*ways[k], answers[k], batch)
        pools.append(pool_call(calls[k], batch, answers[k]))
    pooled, saved = groups.forward(pools, None) if pools else ((), [])
    sums = list(answers)
    for k, own in zip(requests, pooled, strict=True):
        sums[k] = own
    bits = None if bits is None else bits[None]
    return sums, Attempt(list(asks), bits, fetched, saved, asked, read, fits)


def all_messages(
    routes: Sequence[Route],
    sizes: Sequence[int],
    devices: int,
    everywhere: Any,
    least: jax.Array | None = None,
) -> tuple[list[Messages], jax.Array]:
    """The messages for all routes, and the number of bits, ``least`` or more, that tell rounds apart on all devices."""
    needed = [leading_bits(*pair, devices) for pair in zip(routes, sizes, strict=True)]
    needed += [] if least is None else [least]
    bits = lax.pmax(jnp.max(jnp.stack(needed)), everywhere)
    pairs = zip(routes, sizes, strict=True)
    return [messages_of(route, bits, size, devices) for route, size in pairs], bits


def _expected_size(call: Call, requests: Requests) -> int:
    """The rows of a message, by the different ids that the user expects."""
    return rows_of_expected_message(sharding_of(call), requests.distinct.source.shape[0])


def _in_messages_of_expected_sizes(
    calls: Sequence[Call], summed: Sequence[bool]
) -> tuple[list[Ask], jax.Array]:
    """What to ask for, and a number above 0 if messages of the expected sizes do not hold it."""
    asks: list[Ask] = []
    missing = []
    for call, sums in zip(calls, summed, strict=True):
        if sums:
            size = message_of(call)
            spread = spread_of(call, size)
            asks.append(spread)
            missing.append(spread.places.most[0] - size)
        else:
            own = requests_of(call)
            asks.append(own)
            devices = sharding_of(call).layout.devices
            missing.append(leading_bits(own.distinct.route, _expected_size(call, own), devices))
    return asks, jnp.max(jnp.stack(missing))


def _answers(
    calls: Sequence[Call],
    asks: Sequence[Ask],
    ways: dict[int, tuple[Messages, jax.Array]],
    bits: jax.Array | None,
    missing: jax.Array | None,
) -> tuple[list[jax.Array], list[Asked | Batch], Any, jax.Array | None]:
    """The different rows of every table where they are kept, or sums; what was asked for first; and residuals.

    The last result is whether the messages of all devices hold what they ask for, None without ``missing``. There are
    further rounds only if no sums travel.
    """
    sharding = sharding_of(calls[0])
    axes, others, devices = sharding.axes, sharding.others, sharding.layout.devices

    def got(k: Any) -> tuple[list[jax.Array], list[Asked | Batch], Any, jax.Array | None]:
        # Whether messages hold everything goes with them, since another collective would take as long as they do.
        sent = [] if missing is None else [jnp.broadcast_to(missing, (devices, 1))]
        for number, own in enumerate(asks):
            if isinstance(own, Spread):
                sent += own.message()
            else:
                sent += own.distinct.route.message(ways[number][0], k, devices, np.True_)
        parts = iter(exchanged(sent, axes))
        fits = None
        if missing is not None:
            most = jnp.max(next(parts))
            fits = (lax.pmax(most, others) if others else most) <= 0
        asked = [_received(call, own, parts, fits) for call, own in zip(calls, asks, strict=True)]
        reads = [
            own_call(call, own) if isinstance(own, Batch) else read_call(call, own.rows)
            for call, (own, _) in zip(calls, asked, strict=True)
        ]
        sums, read = groups.forward(reads, None)
        answers = []
        for call, (own, keys), sum_ in zip(calls, asked, sums, strict=True):
            if isinstance(own, Batch):
                answers.append(partial_sums(call, sum_))
            else:
                rows = with_missing(call, own, keys, sum_)
                answers.append(_sent_rows(call, rows, devices))
        # A collective that adds in 16 bits would round every sum.
        added = len({x.dtype for x in answers}) == 1 and answers[0].dtype.itemsize > 2
        added = added and all(map(_adds_parts, calls, asks))
        found = (sums_of if added else exchanged)(answers, axes)
        found = [
            whole_sums(call, own, part) if isinstance(own, Spread) else _received_rows(call, part)
            for call, own, part in zip(calls, asks, found, strict=True)
        ]
        return found, [own for own, _ in asked], read, fits

    def other(k: jax.Array, carry: Any) -> Any:
        found, _, read, _ = got(k)
        rows = []
        for number, (table, more) in enumerate(zip(carry[0], found, strict=True)):
            messages, place = ways[number]
            sent = messages.sent(k, devices)
            at = place.at[sent].get(mode="fill", fill_value=table.shape[0])
            rows.append(table.at[at].set(more, mode="drop"))
        return rows, read

    found, asked, read, fits = got(0)
    found, read = other_rounds(other, bits, (found, read))
    return found, asked, read, fits


def _adds_parts(call: Call, own: Ask) -> bool:
    """Whether what comes back from all devices has to be added."""
    return isinstance(own, Spread) and sharding_of(call).layout.columns == 1


def _received(
    call: Call, own: Ask, parts: Iterator[jax.Array], fits: jax.Array | None
) -> tuple[Asked | Batch, AskedKeys | None]:
    """What this device is asked for: nothing unless messages hold everything that all devices ask for."""
    allowed: Any = np.True_ if fits is None else fits
    if isinstance(own, Spread):
        return emptied(received_bags(call, parts), allowed), None
    return received(call, parts, allowed, checked=True)


def _sent_rows(call: Call, sums: jax.Array, devices: int) -> jax.Array:
    storage = sharding_of(call).rows.storage(call.state)
    kind = sharding_of(call).exchange.type_of_rows(storage, sums.dtype)
    return sums.astype(kind).reshape(devices, -1, sums.shape[-1])


def _received_rows(call: Call, rows: jax.Array) -> jax.Array:
    accum = accumulator(sharding_of(call).rows.storage(call.state))
    # Sums of 16-bit rows are in float32.
    kind = accum if accum == jnp.float64 else rows.dtype
    return rows.reshape(-1, rows.shape[-1]).astype(kind)


def _pooled_batch(call: Call, requests: Requests, messages: Messages, kept: jax.Array) -> Batch:
    """The batch with the places of its rows as ids; that of the row after all of them for ids without a row."""
    total = messages.size * sharding_of(call).layout.devices
    ids = jnp.where(requests.read, kept[requests.distinct.places], total)
    ids = jnp.where(requests.here, ids.reshape(requests.here.shape), -1)
    return dataclasses.replace(call.batch, ids=ids, slots=None)
