"""The steps of the rows of one device: gradients travel to the owners of rows, in rounds if they do not fit in one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._jax.vma import on_all_devices
from jax_tt._kinds.sharded.exchange import exchanged, other_rounds
from jax_tt._kinds.sharded.forward import Attempt
from jax_tt._kinds.sharded.local import Asked, asked_call, batch_call, received_rows, rows_call
from jax_tt._kinds.sharded.requests import replicas_of
from jax_tt._kinds.sharded.route import (
    Messages,
    Route,
    all_messages,
    distinct,
    message_rows,
    round_of,
)
from jax_tt._kinds.sharded.sharding import PAGES, sharding_of
from jax_tt._kinds.sharded.spread import Spread, returned_weights
from jax_tt._table import groups
from jax_tt._table.groups import Call


class Sent(NamedTuple):
    """The route of the gradients of rows and its messages.

    ``source`` is the position of the gradient of every entry of the route. ``asked`` is what this device was asked for
    in the forward pass, if gradients arrive in the same places in the first round; else None.
    """

    route: Route
    messages: Messages
    source: jax.Array
    asked: Asked | None


class Trained(NamedTuple):
    """A table with gradients.

    Attributes:
        number: the number of its call.
        call: the lookup.
        grads: the gradients of rows where they are kept, or what `sent_gradients` returns, in the type that travels.
        allowed: whether the table may be stepped.
        sent: where the gradients travel; None for gradients of sums, which go to all devices.
    """

    number: int
    call: Call
    grads: jax.Array
    allowed: Any = None
    sent: Sent | None = None


def exchanged_steps(
    calls: Sequence[Call],
    tables: Sequence[Trained],
    states: Sequence[dict[str, Any]],
    attempt: Attempt,
    wanted: jax.Array,
) -> tuple[list[dict[str, Any]], list[jax.Array], dict[int, jax.Array]]:
    """Steps the rows of this device where ``wanted``, by the gradients of ``tables``; ``states`` are by call.

    Returns:
        The states after the steps; whether each call was stepped; and by call, the gradients of the weights of bags
        whose sums travelled.
    """
    everywhere = sharding_of(calls[0]).everywhere
    allowed = [wanted] * len(calls)
    for number, flag in _allowed(tables, attempt, everywhere).items():
        allowed[number] &= flag
    sent, bits = _sent(tables, attempt, everywhere)
    trained = [
        table._replace(allowed=allowed[table.number], sent=way)
        for table, way in zip(tables, sent, strict=True)
    ]

    def step(
        k: Any, states: Sequence[dict[str, Any]], *, first: bool = False
    ) -> tuple[list[dict[str, Any]], list[jax.Array | None]]:
        # The gradients of sums travel in the first round.
        stepped = [table for table in trained if first or table.sent is not None]
        turn = Turn(k, first, bits, lax.axis_size(everywhere))
        parts = iter(exchanged([x for one in stepped for x in _message(one, turn)], everywhere))
        present = [asked_call(call, what) for call, what in zip(calls, attempt.asked, strict=True)]
        given: list[jax.Array | None] = [None] * len(calls)
        for one in stepped:
            number, call = one.number, one.call
            # Without an optimizer, the states are sums of gradients.
            steps = call.use.table.update is not None
            state = {**call.state, **states[number]} if steps else call.state
            present[number], given[number] = _arrived(one, turn, attempt, parts, state)
        cotangents = groups.backward(present, attempt.read, given, None)
        new = [
            state if g is None else _added(call, state, now)
            for call, state, g, (now, _) in zip(calls, states, given, cotangents, strict=True)
        ]
        return new, [dweights for _, dweights in cotangents]

    states, dweights = step(0, states, first=True)
    weights = returned_weights(calls, attempt.asks, dweights)
    return other_rounds(lambda k, states: step(k, states)[0], bits, states), allowed, weights


class Turn(NamedTuple):
    """A round among some devices; ``bits`` is the number of bits that tell rounds apart, None if there is one round."""

    number: Any
    first: bool
    bits: jax.Array | None
    devices: int

    def keeps_places(self, sent: Sent) -> bool:
        """Whether gradients arrive where the rows of the forward pass were sent from."""
        return self.first and sent.asked is not None


def _message(table: Trained, turn: Turn) -> list[jax.Array]:
    sent, grads, devices = table.sent, table.grads, turn.devices
    if sent is None:
        return [grads]
    shape = devices, sent.messages.size, grads.shape[-1]
    if turn.keeps_places(sent):
        return [grads.reshape(shape)]
    number = sent.messages.sent(turn.number, devices)
    at = sent.source.at[number].get(mode="fill", fill_value=grads.shape[0])
    values = grads.at[at].get(mode="fill", fill_value=0)
    ids = sent.route.message(sent.messages, turn.number, devices, table.allowed)
    return [*ids, values.reshape(shape)]


def _arrived(
    table: Trained, turn: Turn, attempt: Attempt, parts: Iterator[jax.Array], state: Any
) -> tuple[Call, jax.Array]:
    """The step of a table, and the gradients that have arrived for it."""
    sent, call = table.sent, table.call
    accum = accumulator(sharding_of(call).rows.spec.storage(call.state))
    if sent is None:
        bags = attempt.asked[table.number]
        assert isinstance(bags, Batch)
        g = next(parts).astype(accum)
        arrived = batch_call(call, bags, state)
        if call.use.table.update is not None:
            # The weights have gradients also if the rows are not stepped.
            values = {**call.values, "allowed": table.allowed.astype(jnp.float32)}
            arrived = arrived._replace(values=values)
        return arrived, g
    if sent.asked is not None and turn.keeps_places(sent):
        here = table.allowed & (round_of(sent.asked.words, turn.bits) == 0)
        rows = jnp.where(here, sent.asked.rows, -1)
    else:
        rows = received_rows(call, parts, np.True_, checked=False)[0].rows
    grads = next(parts)
    return rows_call(call, rows, state), grads.reshape(-1, 1, grads.shape[-1]).astype(accum)


def _sent(
    tables: Sequence[Trained], attempt: Attempt, everywhere: tuple[str, ...]
) -> tuple[list[Sent | None], jax.Array | None]:
    """Where the gradients of every table travel, and the number of bits that tell the rounds apart."""
    devices = lax.axis_size(everywhere)
    ways: dict[int, Sent] = {}
    for place, table in enumerate(tables):
        layout, k = sharding_of(table.call).layout, table.number
        requests, fetched, asked = attempt.asks[k], attempt.fetched[k], attempt.asked[k]
        if fetched is None or isinstance(requests, Spread):
            continue
        copies = layout.replicas * (devices // layout.devices)
        if copies == 1:
            assert isinstance(asked, Asked)
            route = requests.distinct.route
            ways[place] = Sent(route, fetched.messages, fetched.kept, asked)
            continue
        pages = table.call.state[PAGES]
        given = replicas_of(layout, pages, requests.pages, devices // layout.devices)
        to_all = distinct(given, devices, table.call.use.lookup.method)
        at = to_all.source // copies
        source = fetched.kept.at[at].get(mode="fill", fill_value=table.grads.shape[0])
        ways[place] = Sent(to_all.route, fetched.messages, source, None)
    bits = None if attempt.bits is None else attempt.bits[0]
    if any(way.asked is None for way in ways.values()):
        routes = [way.route for way in ways.values()]
        # Gradients of rows that were read from here arrive where these rows were sent from.
        sizes = [
            message_rows(way.route.row.shape[0], devices)
            if way.asked is None
            else way.messages.size
            for way in ways.values()
        ]
        # With fewer bits than in the forward pass, rows that are kept in free places would be in the first round.
        messages, bits = all_messages(routes, sizes, devices, everywhere, bits)
        pairs = zip(ways.items(), messages, strict=True)
        ways = {place: way._replace(messages=new) for (place, way), new in pairs}
    return [ways.get(place) for place in range(len(tables))], bits


def _allowed(
    tables: Sequence[Trained], attempt: Attempt, everywhere: tuple[str, ...]
) -> dict[int, jax.Array]:
    """Whether all devices allow the step of a table, by call, as far as one of them may not.

    They agree before gradients travel: the first round is stepped before the last one arrives.
    """
    flags = {}
    for number, call, grads, *_ in tables:
        update, ask, own = call.use.table.update, attempt.asks[number], []
        if call.use.lookup.bounds == "error":
            own.append(~ask.refused[0])
        if update is not None and "allowed" in call.values:
            own.append(call.values["allowed"] != 0)
        if update is not None and update.skip_nonfinite:
            # Sums of this many finite gradients are then finite, also once they are scaled.
            wide = grads.astype(accumulator(grads.dtype))
            spread = isinstance(ask, Spread)
            largest = ask.largest(wide) if spread else jnp.max(jnp.abs(wide), initial=0)
            scale = jnp.maximum(jnp.abs(call.values["inv_scale"]), 1).astype(wide.dtype)
            own.append(jnp.isfinite(largest * lax.axis_size(everywhere) * scale))
        if own:
            flags[number] = functools.reduce(jnp.logical_and, own)
    if not flags:
        return {}
    agreed = on_all_devices(jnp.stack(list(flags.values())), everywhere)
    return dict(zip(flags, agreed, strict=True))


def _added(call: Call, state: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    if call.use.table.update is None:
        return {name: state[name] + now[name] for name in state}
    return {name: now[name] for name in state}
