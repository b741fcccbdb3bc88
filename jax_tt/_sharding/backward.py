"""Gradients and steps of one device for the pages that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._lookup import _groups
from jax_tt._lookup._groups import Call, Cotangents
from jax_tt._sharding.exchange import exchanged, other_rounds
from jax_tt._sharding.forward import Residuals, all_messages, pool_call, read_call
from jax_tt._sharding.requests import PAGES, replicas_of, sharded
from jax_tt._sharding.route import Messages, Route, distinct, round_of
from jax_tt._tables.table import Step


def local_backward(
    calls: Sequence[Call],
    residuals: Residuals,
    gs: Sequence[Any],
    axes: tuple[str, ...],
    others: tuple[str, ...],
) -> list[Cotangents]:
    """The cotangents of every call for this device."""
    pools = [
        pool_call(*parts) for parts in zip(calls, residuals.batches, residuals.rows, strict=True)
    ]
    found = _groups.backward(pools, residuals.pooled, gs, None)
    results: list[Cotangents] = [({}, dweights) for _, dweights in found]
    trained = [
        Trained(k, call, found[k][0]["embedding"][: residuals.rows[k].shape[0]])
        for k, call in enumerate(calls)
        if found[k][0]
    ]
    if trained:
        states = _exchanged_steps(trained, residuals, axes, others)
        for table, state in zip(trained, states, strict=True):
            results[table.number] = state, results[table.number][1]
    return results


class Trained(NamedTuple):
    """A table with gradients.

    Attributes:
        number: of its call.
        call: the lookup.
        grads: of the rows where they are kept.
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
        asked: the rows that this device has sent in the forward pass, if gradients arrive in the same places in the
            first round; else None.
        allowed: whether the table is stepped.
    """

    route: Route
    messages: Messages
    source: jax.Array
    asked: jax.Array | None
    allowed: jax.Array


def _exchanged_steps(
    tables: Sequence[Trained], residuals: Residuals, axes: tuple[str, ...], others: tuple[str, ...]
) -> list[dict[str, Any]]:
    everywhere = (*others, *axes)
    devices = lax.axis_size(everywhere)
    sent, bits = _sent(tables, residuals, everywhere)

    def step(
        k: Any, states: Sequence[dict[str, Any]], *, first: bool = False
    ) -> list[dict[str, Any]]:
        parts: list[jax.Array] = []
        for own, of in zip(tables, sent, strict=True):
            if first and of.asked is not None:
                parts.append(own.grads.reshape(devices, of.messages.size, -1))
                continue
            number = of.messages.sent(k, devices)
            row = of.route.row.at[number].get(mode="fill", fill_value=-1)
            at = of.source.at[number].get(mode="fill", fill_value=own.grads.shape[0])
            values = own.grads.at[at].get(mode="fill", fill_value=0)
            parts += [
                jnp.where(of.allowed, row, -1).reshape(devices, -1),
                values.reshape(devices, of.messages.size, -1),
            ]
        got = iter(exchanged(parts, everywhere))
        steps, given = [], []
        for own, of, state in zip(tables, sent, states, strict=True):
            if first and of.asked is not None:
                rows = jnp.where(of.allowed & (round_of(of.asked, bits) == 0), of.asked, -1)
            else:
                rows = next(got).reshape(-1)
            steps.append(read_call(own.call, rows, {**own.call.state, **state}))
            given.append(next(got).reshape(-1, 1, own.grads.shape[-1]))
        new = _groups.backward(steps, residuals.read, given, None)
        return [
            _added(own.call, state, now)
            for own, state, (now, _) in zip(tables, states, new, strict=True)
        ]

    start = [_start(own.call) for own in tables]
    states = other_rounds(step, bits, step(0, start, first=True))
    return [
        _finished(own.call, state, of.allowed)
        for own, state, of in zip(tables, states, sent, strict=True)
    ]


def _sent(
    tables: Sequence[Trained], residuals: Residuals, everywhere: tuple[str, ...]
) -> tuple[list[Sent], jax.Array]:
    """What is sent of every table, and the number of bits that tell the rounds apart."""
    devices = lax.axis_size(everywhere)
    allowed = _allowed(tables, residuals, everywhere)
    found = []
    for table, flag in zip(tables, allowed, strict=True):
        layout, k = sharded(table.call).layout, table.number
        requests, kept = residuals.requests[k], residuals.kept[k]
        copies = layout.replicas * (devices // layout.devices)
        if copies == 1:
            route, messages = requests.distinct.route, residuals.messages[k]
            found.append(Sent(route, messages, kept, residuals.asked[k], flag))
            continue
        pages = table.call.state[PAGES]
        given = replicas_of(layout, pages, requests.pages, devices // layout.devices)
        to_all = distinct(given, devices, table.call.use.lookup.method)
        source = kept.at[to_all.source // copies].get(mode="fill", fill_value=table.grads.shape[0])
        found.append(Sent(to_all.route, residuals.messages[k], source, None, flag))
    bits = residuals.bits[0]
    if any(of.asked is None for of in found):
        # With fewer bits than in the forward pass, rows that are kept in free places would be in the first round.
        messages, bits = all_messages([of.route for of in found], devices, everywhere, bits)
        found = [of._replace(messages=own) for of, own in zip(found, messages, strict=True)]
    return found, bits


def _allowed(
    tables: Sequence[Trained], residuals: Residuals, everywhere: tuple[str, ...]
) -> list[jax.Array]:
    """Whether all devices allow the step of a table, so that they agree."""
    flags = {}
    for k, (number, call, grads) in enumerate(tables):
        update = call.use.table.update
        if call.use.lookup.bounds == "error":
            flags[k] = ~residuals.requests[number].refused[0]
        if update is not None and update.skip_nonfinite:
            # Sums of this many finite gradients are then finite.
            largest = jnp.max(jnp.abs(grads), initial=0) * lax.axis_size(everywhere)
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
    new, _, _ = local.after_step(call.state, step, params, slots, jnp.ones(()), None)
    return new
