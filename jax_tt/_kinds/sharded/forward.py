"""The forward pass of one device: it asks the owners of rows for rows or sums, and answers what it is asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._kinds.sharded.columns import in_columns, joined_columns
from jax_tt._kinds.sharded.exchange import exchanged, other_rounds, sums_of, unless
from jax_tt._kinds.sharded.local import (
    Asked,
    AskedKeys,
    asked_call,
    received_call,
    received_rows,
    with_missing,
)
from jax_tt._kinds.sharded.requests import RowRequests, row_requests
from jax_tt._kinds.sharded.route import (
    Messages,
    all_messages,
    kept_places,
    leading_bits,
    message_rows,
    messages_of,
)
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._kinds.sharded.spread import (
    Spread,
    received_bags,
    spread_of,
    whole_sums,
)
from jax_tt._kinds.sharded.travels import message_of, rows_of_expected_message, sums_travel
from jax_tt._table import groups
from jax_tt._table.groups import Call

# What a device asks of the others for a table: different rows, or sums of the rows of bags.
Ask = RowRequests | Spread


class FetchedRows(NamedTuple):
    """The different rows of a batch, ``rows[n, D]``, after they have arrived.

    ``messages`` asked for them, ``kept`` is the position of each in ``rows``, and the ids of ``batch`` are positions.
    """

    messages: Messages
    kept: jax.Array
    rows: jax.Array
    batch: Batch


class Attempt(NamedTuple):
    """A lookup with messages of some size.

    Attributes:
        asks: what this device asks for, by table.
        bits: the number of bits that tell the rounds apart, ``[1]``; None if there is one round.
        fetched: rows, by table; None for tables whose sums travel.
        pooled: residuals of the sums of fetched rows.
        asked: what this device is asked for in the first round, by table: rows, or bags of them.
        read: residuals of the lookup of ``asked``.
        fits: whether messages of the expected sizes hold what all devices ask for, ``[1]``; None if there are rounds,
            whose messages hold any batch.
    """

    asks: list[Ask]
    bits: jax.Array | None
    fetched: list[FetchedRows | None]
    pooled: Any
    asked: list[Asked | Batch]
    read: Any
    fits: jax.Array | None


# What a device gets from the others, by table the different rows where they are kept, or sums; then `asked`, `read` and
# `fits`, a scalar, of an `Attempt`.
Answers = tuple[list[jax.Array], list[Asked | Batch], Any, jax.Array | None]


def local_forward(calls: Sequence[Call]) -> tuple[list[jax.Array], Attempt]:
    """Sums ``[S, nb, D]`` of every call for the batch of this device, and the first attempt, for the backward pass.

    Whether its messages hold everything is known after the last attempt.
    """
    calls = [in_columns(call) for call in calls]
    summed = [sums_travel(call) for call in calls]
    usual = all(sharding_of(call).exchange.expects_nothing for call in calls)
    if usual and not any(summed):
        sums, attempt = attempted(calls, all_requests(calls))
    else:
        asks, missing = _asks_of_expected_sizes(calls, summed)
        first, attempt = attempted(calls, asks, missing)
        assert attempt.fits is not None

        def again(_: Any, batches: Sequence[Batch]) -> list[jax.Array]:
            present = with_batches(calls, batches)
            return attempted(present, all_requests(present))[0]

        sums, fits = unless(attempt.fits[0], again, first, [call.batch for call in calls])
        attempt = attempt._replace(fits=fits[None])
    sums = [joined_columns(call, part) for call, part in zip(calls, sums, strict=True)]
    return sums, attempt


def with_batches(calls: Sequence[Call], batches: Sequence[Batch]) -> list[Call]:
    """The calls with other batches."""
    return [call._replace(batch=batch) for call, batch in zip(calls, batches, strict=True)]


def all_requests(calls: Sequence[Call]) -> list[RowRequests]:
    """The different rows that this device's part of every batch reads."""
    return [row_requests(call) for call in calls]


def attempted(
    calls: Sequence[Call], asks: Sequence[Ask], missing: jax.Array | None = None
) -> tuple[list[jax.Array], Attempt]:
    """Sums of every call, in as many rounds as it takes.

    With ``missing``, there is one round of messages of the expected sizes; it is 0 or less if they hold what this
    device asks for. If the messages of any device do not, nothing is asked for, and the sums have no meaning.
    """
    sharding = sharding_of(calls[0])
    devices = sharding.layout.devices
    requests = {k: ask for k, ask in enumerate(asks) if isinstance(ask, RowRequests)}
    routes = [ask.distinct.route for ask in requests.values()]
    if missing is not None:
        bits = None
        sizes = [_expected_size(calls[k], ask) for k, ask in requests.items()]
        pairs = zip(routes, sizes, strict=True)
        messages = [messages_of(route, bits, size, devices) for route, size in pairs]
        kept = [one.place for one in messages]
    else:
        sizes = [message_rows(route.row.shape[0], devices) for route in routes]
        messages, bits = all_messages(routes, sizes, devices, sharding.everywhere)
        kept = [kept_places(one, bits, devices) for one in messages]
    ways = dict(zip(requests, zip(messages, kept, strict=True), strict=True))
    sums, asked, read, fits = _answers(calls, asks, ways, bits, missing)
    if fits is not None:
        asks = [ask.only_if(fits) for ask in asks]
        fits = fits[None]
    fetched: list[FetchedRows | None] = [None] * len(calls)
    pools = []
    for k, ask in requests.items():
        rows, batch = sums[k], _pooled_batch(calls[k], ask, *ways[k])
        fetched[k] = FetchedRows(*ways[k], rows, batch)
        pools.append(received_call(calls[k], batch, rows))
    pooled, saved = groups.forward(pools, None) if pools else ((), [])
    for k, part in zip(requests, pooled, strict=True):
        sums[k] = part
    bits = None if bits is None else bits[None]
    return sums, Attempt(list(asks), bits, fetched, saved, asked, read, fits)


def _expected_size(call: Call, requests: RowRequests) -> int:
    """The rows of a message, by the different ids that the user expects."""
    return rows_of_expected_message(sharding_of(call), requests.distinct.source.shape[0])


def _asks_of_expected_sizes(
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
            requests = row_requests(call)
            asks.append(requests)
            route, devices = requests.distinct.route, sharding_of(call).layout.devices
            missing.append(leading_bits(route, _expected_size(call, requests), devices))
    return asks, jnp.max(jnp.stack(missing))


def _answers(
    calls: Sequence[Call],
    asks: Sequence[Ask],
    ways: dict[int, tuple[Messages, jax.Array]],
    bits: jax.Array | None,
    missing: jax.Array | None,
) -> Answers:
    """Asks the other devices and answers them, in further rounds only if no sums travel."""
    devices = sharding_of(calls[0]).layout.devices

    def of_other_round(k: jax.Array, carry: Any) -> Any:
        found, _, read, _ = _answers_of_round(k, calls, asks, ways, missing)
        rows = []
        for number, pair in enumerate(zip(carry[0], found, strict=True)):
            messages, kept = ways[number]
            rows.append(messages.with_round(*pair, kept, k, devices))
        return rows, read

    values, asked, read, fits = _answers_of_round(0, calls, asks, ways, missing)
    values, read = other_rounds(of_other_round, bits, (values, read))
    return values, asked, read, fits


def _answers_of_round(
    k: Any,
    calls: Sequence[Call],
    asks: Sequence[Ask],
    ways: dict[int, tuple[Messages, jax.Array]],
    missing: jax.Array | None,
) -> Answers:
    sharding = sharding_of(calls[0])
    devices = sharding.layout.devices
    # Whether messages hold everything goes with them, since another collective would take as long as they do.
    sent = [] if missing is None else [jnp.broadcast_to(missing, (devices, 1))]
    for number, ask in enumerate(asks):
        if isinstance(ask, Spread):
            sent += ask.message()
        else:
            sent += ask.distinct.route.message(ways[number][0], k, devices, np.True_)
    parts = iter(exchanged(sent, sharding.axes))
    fits = None
    if missing is not None:
        most = jnp.max(next(parts))
        fits = (lax.pmax(most, sharding.others) if sharding.others else most) <= 0
    # Nothing is asked for unless messages hold everything that all devices ask for.
    allowed: Any = np.True_ if fits is None else fits
    asked: list[tuple[Asked | Batch, AskedKeys | None]] = [
        (received_bags(call, parts, allowed), None)
        if isinstance(ask, Spread)
        else received_rows(call, parts, allowed, checked=True)
        for call, ask in zip(calls, asks, strict=True)
    ]
    reads = [asked_call(call, what) for call, (what, _) in zip(calls, asked, strict=True)]
    sums, read = groups.forward(reads, None)
    answers = []
    for call, (what, keys), part in zip(calls, asked, sums, strict=True):
        if isinstance(what, Batch):
            answers.append(part.astype(sharding_of(call).exchange.type_of_sums(part.dtype)))
        else:
            answers.append(_sent_rows(call, with_missing(call, what, keys, part), devices))
    # A collective that adds in 16 bits would round every sum. Sums of column shards stand side by side.
    added = len({x.dtype for x in answers}) == 1 and answers[0].dtype.itemsize > 2
    added &= all(isinstance(ask, Spread) for ask in asks)
    added &= all(sharding_of(call).layout.columns == 1 for call in calls)
    received = (sums_of if added else exchanged)(answers, sharding.axes)
    values = [
        whole_sums(call, ask, part) if isinstance(ask, Spread) else _arrived_rows(call, part)
        for call, ask, part in zip(calls, asks, received, strict=True)
    ]
    return values, [what for what, _ in asked], read, fits


def _sent_rows(call: Call, sums: jax.Array, devices: int) -> jax.Array:
    sharding = sharding_of(call)
    kind = sharding.exchange.type_of_rows(sharding.rows.spec.storage(call.state), sums.dtype)
    return sums.astype(kind).reshape(devices, -1, sums.shape[-1])


def _arrived_rows(call: Call, rows: jax.Array) -> jax.Array:
    accum = accumulator(sharding_of(call).rows.spec.storage(call.state))
    # Sums of 16-bit rows are in float32.
    kind = accum if accum == jnp.float64 else rows.dtype
    return rows.reshape(-1, rows.shape[-1]).astype(kind)


def _pooled_batch(call: Call, requests: RowRequests, messages: Messages, kept: jax.Array) -> Batch:
    """The batch with positions of fetched rows as ids; ids without a row become the position after all of them."""
    total = messages.size * sharding_of(call).layout.devices
    ids = jnp.where(requests.read, kept[requests.distinct.places], total)
    ids = jnp.where(requests.here, ids.reshape(requests.here.shape), -1)
    return dataclasses.replace(call.batch, ids=ids, slots=None)
