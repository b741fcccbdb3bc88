"""Gradients and steps of one device for the pages that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._dtypes import accumulator
from jax_tt._lookup import _groups
from jax_tt._lookup._groups import Call, Cotangents
from jax_tt._sharding.asked import Asked, received
from jax_tt._sharding.columns import in_columns, of_weights, separated_columns
from jax_tt._sharding.exchange import exchanged, other_rounds, unless
from jax_tt._sharding.forward import (
    Attempt,
    Residuals,
    all_messages,
    attempted,
    pool_call,
    read_call,
)
from jax_tt._sharding.requests import PAGES, replicas_of, sharded
from jax_tt._sharding.route import Messages, Route, distinct, message_rows, round_of
from jax_tt._tables.table import Step


class Carried(NamedTuple):
    """What an attempt changes.

    Attributes:
        states: of every table with gradients, the arrays of rows, or sums of their gradients.
        allowed: whether each of these tables is stepped.
        weights: the gradients of the weights of every table, or None.
    """

    states: list[dict[str, jax.Array]]
    allowed: list[jax.Array]
    weights: list[jax.Array | None]


def local_backward(
    calls: Sequence[Call],
    residuals: Residuals,
    gs: Sequence[Any],
    axes: tuple[str, ...],
    others: tuple[str, ...],
) -> list[Cotangents]:
    """The cotangents of every call for this device."""
    calls = [in_columns(call) for call in calls]
    gs = [
        None if g is None else separated_columns(call, g) for call, g in zip(calls, gs, strict=True)
    ]

    def stepped(attempt: Attempt, states: Sequence[dict[str, Any]]) -> Carried:
        return _attempted(calls, attempt, gs, states, axes, others)

    def again(carried: Carried) -> Carried:
        # The first attempt changed nothing. To read the arrays from before it, XLA would keep a copy of them.
        present = list(calls)
        for k, state in zip(trained, carried.states, strict=True):
            if calls[k].use.table.update is not None:
                present[k] = calls[k]._replace(state={**calls[k].state, **state})
        _, attempt = attempted(present, residuals.requests, axes, others)
        return stepped(attempt, carried.states)

    trained = [
        k
        for k, (call, g) in enumerate(zip(calls, gs, strict=True))
        if g is not None and call.use.lookup.wanted.names
    ]
    found = stepped(residuals.attempt, [_start(calls[k]) for k in trained])
    if residuals.fits is not None:
        found = unless(residuals.fits[0], again, found)
    results: list[Cotangents] = [
        ({}, of_weights(call, dweights))
        for call, dweights in zip(calls, found.weights, strict=True)
    ]
    for k, state, allowed in zip(trained, found.states, found.allowed, strict=True):
        results[k] = _finished(calls[k], state, allowed), results[k][1]
    return results


def _attempted(
    calls: Sequence[Call],
    attempt: Attempt,
    gs: Sequence[Any],
    states: Sequence[dict[str, Any]],
    axes: tuple[str, ...],
    others: tuple[str, ...],
) -> Carried:
    pools = [pool_call(*parts) for parts in zip(calls, attempt.batches, attempt.rows, strict=True)]
    found = _groups.backward(pools, attempt.pooled, gs, None)
    trained = []
    for k, (call, (own, _)) in enumerate(zip(calls, found, strict=True)):
        if own:
            grads = own["embedding"][: attempt.rows[k].shape[0]]
            accum = accumulator(sharded(call).storage(call.state))
            kind = sharded(call).exchange.type_of_gradients(accum)
            trained.append(Trained(k, call, grads.astype(kind)))
    allowed: list[jax.Array] = []
    if trained:
        states, allowed = _exchanged_steps(trained, states, attempt, axes, others)
    return Carried(list(states), allowed, [dweights for _, dweights in found])


class Trained(NamedTuple):
    """A table with gradients.

    Attributes:
        number: of its call.
        call: the lookup.
        grads: of the rows where they are kept, in the type in which they travel.
    """

    number: int
    call: Call
    grads: jax.Array


class Sent(NamedTuple):
    """What is sent of a table.

    Attributes:
        route: to the rows.
        messages: of the route.
        source: where the gradient of every entry of the route is.
        asked: what this device was asked for in the forward pass, if gradients arrive in the same places in the first
            round; else None.
        allowed: whether the table is stepped.
    """

    route: Route
    messages: Messages
    source: jax.Array
    asked: Asked | None
    allowed: jax.Array


def _exchanged_steps(
    tables: Sequence[Trained],
    states: Sequence[dict[str, Any]],
    attempt: Attempt,
    axes: tuple[str, ...],
    others: tuple[str, ...],
) -> tuple[list[dict[str, Any]], list[jax.Array]]:
    """The states after the steps, and whether each table was stepped."""
    everywhere = (*others, *axes)
    devices = lax.axis_size(everywhere)
    sent, bits = _sent(tables, attempt, everywhere)

    def step(
        k: Any, states: Sequence[dict[str, Any]], *, first: bool = False
    ) -> list[dict[str, Any]]:
        parts: list[jax.Array] = []
        for own, of in zip(tables, sent, strict=True):
            if first and of.asked is not None:
                parts.append(own.grads.reshape(devices, of.messages.size, -1))
                continue
            number = of.messages.sent(k, devices)
            at = of.source.at[number].get(mode="fill", fill_value=own.grads.shape[0])
            values = own.grads.at[at].get(mode="fill", fill_value=0)
            parts += of.route.message(of.messages, k, devices, of.allowed)
            parts.append(values.reshape(devices, of.messages.size, -1))
        got = iter(exchanged(parts, everywhere))
        steps, given = [], []
        for own, of, state in zip(tables, sent, states, strict=True):
            if first and of.asked is not None:
                here = of.allowed & (round_of(of.asked.words, bits) == 0)
                rows = jnp.where(here, of.asked.rows, -1)
            else:
                rows = received(own.call, got, checked=False)[0].rows
            steps.append(read_call(own.call, rows, {**own.call.state, **state}))
            accum = accumulator(sharded(own.call).storage(own.call.state))
            given.append(next(got).reshape(-1, 1, own.grads.shape[-1]).astype(accum))
        new = _groups.backward(steps, attempt.read, given, None)
        return [
            _added(own.call, state, now)
            for own, state, (now, _) in zip(tables, states, new, strict=True)
        ]

    states = other_rounds(step, bits, step(0, states, first=True))
    return states, [of.allowed for of in sent]


def _sent(
    tables: Sequence[Trained], attempt: Attempt, everywhere: tuple[str, ...]
) -> tuple[list[Sent], jax.Array | None]:
    """What is sent of every table, and the number of bits that tell the rounds apart."""
    devices = lax.axis_size(everywhere)
    allowed = _allowed(tables, attempt, everywhere)
    found = []
    for table, flag in zip(tables, allowed, strict=True):
        layout, k = sharded(table.call).layout, table.number
        requests, kept = attempt.requests[k], attempt.kept[k]
        copies = layout.replicas * (devices // layout.devices)
        if copies == 1:
            route, messages = requests.distinct.route, attempt.messages[k]
            found.append(Sent(route, messages, kept, attempt.asked[k], flag))
            continue
        pages = table.call.state[PAGES]
        given = replicas_of(layout, pages, requests.pages, devices // layout.devices)
        to_all = distinct(given, devices, table.call.use.lookup.method)
        source = kept.at[to_all.source // copies].get(mode="fill", fill_value=table.grads.shape[0])
        found.append(Sent(to_all.route, attempt.messages[k], source, None, flag))
    bits = None if attempt.bits is None else attempt.bits[0]
    if any(of.asked is None for of in found):
        routes = [of.route for of in found]
        # Gradients of rows that were read from here arrive where these rows were sent from.
        sizes = [
            message_rows(route.row.shape[0], devices) if of.asked is None else of.messages.size
            for route, of in zip(routes, found, strict=True)
        ]
        # With fewer bits than in the forward pass, rows that are kept in free places would be in the first round.
        messages, bits = all_messages(routes, sizes, devices, everywhere, bits)
        found = [of._replace(messages=own) for of, own in zip(found, messages, strict=True)]
    return found, bits


def _allowed(
    tables: Sequence[Trained], attempt: Attempt, everywhere: tuple[str, ...]
) -> list[jax.Array]:
    """Whether all devices allow the step of a table, so that they agree."""
    flags = {}
    for k, (number, call, grads) in enumerate(tables):
        update = call.use.table.update
        if call.use.lookup.bounds == "error":
            flags[k] = ~attempt.requests[number].refused[0]
        if update is not None and update.skip_nonfinite:
            # Sums of this many finite gradients are then finite.
            wide = grads.astype(accumulator(grads.dtype))
            largest = jnp.max(jnp.abs(wide), initial=0) * lax.axis_size(everywhere)
            flags[k] = flags.get(k, jnp.ones((), bool)) & jnp.isfinite(largest)
    if not flags:
        return [jnp.ones((), bool)] * len(tables)
    found = lax.pmin(jnp.stack(list(flags.values())).astype(jnp.int32), everywhere) > 0
    agreed = dict(zip(flags, found, strict=True))
    return [agreed.get(k, jnp.ones((), bool)) for k in range(len(tables))]


def _start(call: Call) -> dict[str, Any]:
    """What rounds add to or step: gradients of zero, or the arrays of rows."""
    table = call.use.table
    if table.update is None:
        return {
            name: jnp.zeros_like(
                call.state[name], jnp.promote_types(call.state[name].dtype, jnp.float32)
            )
            for name in table.param_names
        }
    return {name: call.state[name] for name in table.row_arrays}


def _added(call: Call, state: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    if call.use.table.update is None:
        return {name: state[name] + now[name] for name in state}
    return {name: now[name] for name in state}


def _finished(call: Call, state: dict[str, Any], allowed: jax.Array) -> dict[str, Any]:
    table = call.use.table
    if table.update is None:
        return state
    local, applied = sharded(call).local, allowed.astype(jnp.float32)
    params, slots = local.params(state), local.stepped_slots(state)
    values = {**call.values, "allowed": applied}
    step = Step(call.batch, applied, call.use.lookup, values)
    new, _, _ = local.after_step(call.state, step, params, slots, jnp.ones((), jnp.float32), None)
    return new
