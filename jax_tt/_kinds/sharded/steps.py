"""The steps of the pages of one device: gradients travel to the owners of rows, in rounds if they do not fit in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._kinds.sharded.asked import Asked, received
from jax_tt._kinds.sharded.exchange import exchanged, other_rounds
from jax_tt._kinds.sharded.forward import Attempt, all_messages
from jax_tt._kinds.sharded.reads import own_call, read_call
from jax_tt._kinds.sharded.requests import replicas_of
from jax_tt._kinds.sharded.route import Messages, Route, distinct, message_rows, round_of
from jax_tt._kinds.sharded.sharding import PAGES, sharding_of
from jax_tt._kinds.sharded.spread import Spread
from jax_tt._kinds.sharded.weights import returned_weights
from jax_tt._table import groups
from jax_tt._table.groups import Call


class Trained(NamedTuple):
    """A table with gradients.

    Attributes:
        number: of its call.
        call: the lookup.
        grads: of the rows where they are kept, or those of `sent_gradients`, in the type in which they travel.
    """

    number: int
    call: Call
    grads: jax.Array


class Sent(NamedTuple):
    """Where the gradients of rows travel.

    Attributes:
        route: to the rows.
        messages: of the route.
        source: where the gradient of every entry of the route is.
        asked: what this device was asked for in the forward pass, if gradients arrive in the same places in the first
            round; else None.
    """

    route: Route
    messages: Messages
    source: jax.Array
    asked: Asked | None


def exchanged_steps(
    calls: Sequence[Call],
    tables: Sequence[Trained],
    states: Sequence[dict[str, Any]],
    attempt: Attempt,
    wanted: jax.Array,
) -> tuple[list[dict[str, Any]], list[jax.Array], dict[int, jax.Array]]:
    """The steps of the pages of this device.

    Args:
        calls: all lookups.
        tables: some of their tables, with gradients.
        states: of every call, what is stepped.
        attempt: the forward pass.
        wanted: whether there are to be steps.

    Returns:
        The states after the steps; of every call, whether it was stepped; and the gradients of the weights of bags
        whose sums have travelled.
    """
    everywhere = sharding_of(calls[0]).everywhere
    allowed = [wanted] * len(calls)
    for table, flag in zip(tables, _allowed(tables, attempt, everywhere), strict=True):
        allowed[table.number] &= flag
    sent, bits = _sent(tables, attempt, everywhere)

    def step(
        k: Any, states: Sequence[dict[str, Any]], *, first: bool = False
    ) -> tuple[list[dict[str, Any]], list[jax.Array | None]]:
        # The gradients of sums travel in the first round.
        stepped = [
            Stepped(table, own, allowed[table.number])
            for table, own in zip(tables, sent, strict=True)
            if first or own is not None
        ]
        turn = Turn(k, first, bits, lax.axis_size(everywhere))
        got = iter(exchanged([x for own in stepped for x in _message(own, turn)], everywhere))
        present = [_asked_call(call, own) for call, own in zip(calls, attempt.asked, strict=True)]
        given: list[jax.Array | None] = [None] * len(calls)
        for own in stepped:
            number, call, _ = own.table
            # Without an optimizer, the states are sums of gradients.
            steps = call.use.table.update is not None
            state = {**call.state, **states[number]} if steps else call.state
            present[number], given[number] = _arrived(own, turn, attempt, got, state)
        found = groups.backward(present, attempt.read, given, None)
        new = [
            state if g is None else _added(call, state, now)
            for call, state, g, (now, _) in zip(calls, states, given, found, strict=True)
        ]
        return new, [dweights for _, dweights in found]

    states, dweights = step(0, states, first=True)
    weights = returned_weights(calls, attempt.asks, dweights)
    return other_rounds(lambda k, states: step(k, states)[0], bits, states), allowed, weights


class Stepped(NamedTuple):
    """A table that a round steps.

    Attributes:
        table: with its gradients.
        sent: where they travel; None if they are those of sums, which go to all devices.
        allowed: whether the table may be stepped.
    """

    table: Trained
    sent: Sent | None
    allowed: jax.Array


class Turn(NamedTuple):
    """A round.

    Attributes:
        number: of the round.
        first: whether it is the first one.
        bits: that tell rounds apart; None if there is one.
        devices: how many there are.
    """

    number: Any
    first: bool
    bits: jax.Array | None
    devices: int

    def keeps_places(self, of: Sent) -> bool:
        """Whether gradients arrive where the rows of the forward pass were sent from."""
        return self.first and of.asked is not None


def _message(own: Stepped, turn: Turn) -> list[jax.Array]:
    of, grads, devices = own.sent, own.table.grads, turn.devices
    if of is None:
        return [grads]
    shape = devices, of.messages.size, grads.shape[-1]
    if turn.keeps_places(of):
        return [grads.reshape(shape)]
    number = of.messages.sent(turn.number, devices)
    at = of.source.at[number].get(mode="fill", fill_value=grads.shape[0])
    values = grads.at[at].get(mode="fill", fill_value=0)
    return [
        *of.route.message(of.messages, turn.number, devices, own.allowed),
        values.reshape(shape),
    ]


def _arrived(
    own: Stepped, turn: Turn, attempt: Attempt, got: Iterator[jax.Array], state: Any
) -> tuple[Call, jax.Array]:
    """The step of a table, and the gradients that have arrived for it."""
    of, call = own.sent, own.table.call
    accum = accumulator(sharding_of(call).rows.storage(call.state))
    if of is None:
        bags = attempt.asked[own.table.number]
        assert isinstance(bags, Batch)
        g = next(got).astype(accum)
        arrived = own_call(call, bags, state)
        if call.use.table.update is not None:
            # The weights have gradients also if the rows are not stepped.
            values = {**call.values, "allowed": own.allowed.astype(jnp.float32)}
            arrived = arrived._replace(values=values)
        return arrived, g
    if of.asked is not None and turn.keeps_places(of):
        here = own.allowed & (round_of(of.asked.words, turn.bits) == 0)
        rows = jnp.where(here, of.asked.rows, -1)
    else:
        rows = received(call, got, np.True_, checked=False)[0].rows
    grads = next(got)
    return read_call(call, rows, state), grads.reshape(-1, 1, grads.shape[-1]).astype(accum)


def _asked_call(call: Call, asked: Asked | Batch) -> Call:
    """The lookup of what was asked for in the forward pass."""
    return own_call(call, asked) if isinstance(asked, Batch) else read_call(call, asked.rows)


def _sent(
    tables: Sequence[Trained], attempt: Attempt, everywhere: tuple[str, ...]
) -> tuple[list[Sent | None], jax.Array | None]:
    """Where the gradients of every table travel, and the number of bits that tell the rounds apart."""
    devices = lax.axis_size(everywhere)
    found: dict[int, Sent] = {}
    for place, table in enumerate(tables):
        layout, k = sharding_of(table.call).layout, table.number
        requests, fetched, asked = attempt.asks[k], attempt.fetched[k], attempt.asked[k]
        if fetched is None or isinstance(requests, Spread):
            continue
        copies = layout.replicas * (devices // layout.devices)
        if copies == 1:
            assert isinstance(asked, Asked)
            route = requests.distinct.route
            found[place] = Sent(route, fetched.messages, fetched.kept, asked)
            continue
        pages = table.call.state[PAGES]
        given = replicas_of(layout, pages, requests.pages, devices // layout.devices)
        to_all = distinct(given, devices, table.call.use.lookup.method)
        at = to_all.source // copies
        source = fetched.kept.at[at].get(mode="fill", fill_value=table.grads.shape[0])
        found[place] = Sent(to_all.route, fetched.messages, source, None)
    bits = None if attempt.bits is None else attempt.bits[0]
    if any(of.asked is None for of in found.values()):
        routes = [of.route for of in found.values()]
        # Gradients of rows that were read from here arrive where these rows were sent from.
        sizes = [
            message_rows(of.route.row.shape[0], devices) if of.asked is None else of.messages.size
            for of in found.values()
        ]
        # With fewer bits than in the forward pass, rows that are kept in free places would be in the first round.
        messages, bits = all_messages(routes, sizes, devices, everywhere, bits)
        pairs = zip(found.items(), messages, strict=True)
        found = {place: of._replace(messages=own) for (place, of), own in pairs}
    return [found.get(place) for place in range(len(tables))], bits


def _allowed(
    tables: Sequence[Trained], attempt: Attempt, everywhere: tuple[str, ...]
) -> list[jax.Array]:
    """Whether all devices allow the step of a table, so that they agree."""
    flags = {}
    for k, (number, call, grads) in enumerate(tables):
        update = call.use.table.update
        ask = attempt.asks[number]
        if call.use.lookup.bounds == "error":
            flags[k] = ~ask.refused[0]
        if update is not None and update.skip_nonfinite:
            # Sums of this many finite gradients are then finite.
            wide = grads.astype(accumulator(grads.dtype))
            own = (
                ask.largest(wide) if isinstance(ask, Spread) else jnp.max(jnp.abs(wide), initial=0)
            )
            largest = own * lax.axis_size(everywhere)
            flags[k] = flags.get(k, jnp.ones((), bool)) & jnp.isfinite(largest)
    if not flags:
        return [jnp.ones((), bool)] * len(tables)
    found = lax.pmin(jnp.stack(list(flags.values())).astype(jnp.int32), everywhere) > 0
    agreed = dict(zip(flags, found, strict=True))
    return [agreed.get(k, jnp.ones((), bool)) for k in range(len(tables))]


def _added(call: Call, state: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    if call.use.table.update is None:
        return {name: state[name] + now[name] for name in state}
    return {name: now[name] for name in state}
