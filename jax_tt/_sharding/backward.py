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
from jax_tt._sharding.forward import (
    Residuals,
    all_messages,
    described_rows,
    pool_call,
    read_call,
)
from jax_tt._sharding.requests import PAGES, Requests, replicas_of, sharded
from jax_tt._sharding.route import Route, message_rows, sorted_route
from jax_tt._tables.table import Step


def local_backward(
    calls: Sequence[Call],
    residuals: Residuals,
    gs: Sequence[Any],
    axes: tuple[str, ...],
    others: tuple[str, ...],
) -> list[Cotangents]:
    """The cotangents of every call for this device."""
    devices = sharded(calls[0]).layout.devices
    pools = [
        pool_call(
            call, batch, described_rows(call, _kept_size(own, devices)) if rows is None else rows
        )
        for call, batch, own, rows in zip(
            calls, residuals.batches, residuals.requests, residuals.rows, strict=True
        )
    ]
    found = _groups.backward(pools, residuals.pooled, gs, None)
    trained = [k for k, (grads, _) in enumerate(found) if grads]
    results: list[Cotangents] = [({}, dweights) for _, dweights in found]
    if not trained:
        return results
    own = [
        Trained(
            calls[k],
            residuals.requests[k],
            residuals.kept[k],
            found[k][0]["embedding"][: _kept_size(residuals.requests[k], devices)],
        )
        for k in trained
    ]
    states = _exchanged_steps(own, residuals, axes, others)
    for k, state in zip(trained, states, strict=True):
        results[k] = state, results[k][1]
    return results


class Trained(NamedTuple):
    """A table with gradients.

    Attributes:
        call: the lookup.
        requests: the different rows of the batch.
        kept: the places of their gradients.
        grads: of all places.
    """

    call: Call
    requests: Requests
    kept: jax.Array
    grads: jax.Array


def _kept_size(requests: Requests, devices: int) -> int:
    return devices * message_rows(requests.distinct.route.row.shape[0], devices)


def _exchanged_steps(
    tables: Sequence[Trained], residuals: Residuals, axes: tuple[str, ...], others: tuple[str, ...]
) -> list[dict[str, Any]]:
    everywhere = (*others, *axes)
    devices = lax.axis_size(everywhere)
    copies = devices // sharded(tables[0].call).layout.devices
    allowed = _allowed(tables, everywhere)
    pairs = [_to_replicas(*pair, copies) for pair in zip(tables, allowed, strict=True)]
    routes, sources = zip(*pairs, strict=True)
    # With fewer bits than the forward pass had, rows that were kept elsewhere would be in the first round.
    messages, bits = all_messages(routes, devices, everywhere, residuals.bits[0])

    def step(k: Any, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        sent: list[jax.Array] = []
        for own, table, route, source in zip(tables, messages, routes, sources, strict=True):
            number = table.sent(k, devices)
            row = route.row.at[number].get(mode="fill", fill_value=-1)
            if source is None and isinstance(k, int):
                # The rows of the first round are where they arrived. Others are not sent, as their row is -1.
                values = own.grads
            else:
                entry = own.kept if source is None else own.kept[source]
                at = entry.at[number].get(mode="fill", fill_value=own.grads.shape[0])
                values = own.grads.at[at].get(mode="fill", fill_value=0)
            sent += [row.reshape(devices, -1), values.reshape(devices, table.size, -1)]
        got = exchanged(sent, everywhere)
        steps, given = [], []
        for own, rows, values, state in zip(tables, got[::2], got[1::2], states, strict=True):
            steps.append(read_call(own.call, rows.reshape(-1), {**own.call.state, **state}))
            given.append(values.reshape(-1, 1, values.shape[-1]))
        new = _groups.backward(steps, residuals.read, given, None)
        return [
            _added(own.call, state, now)
            for own, state, (now, _) in zip(tables, states, new, strict=True)
        ]

    states = other_rounds(step, bits, step(0, [_start(own.call) for own in tables]))
    return [
        _finished(own.call, *parts) for own, *parts in zip(tables, states, allowed, strict=True)
    ]


def _allowed(tables: Sequence[Trained], everywhere: tuple[str, ...]) -> list[jax.Array]:
    """Whether all devices allow the step of a table, so that they agree."""
    flags = []
    for call, requests, _, grads in tables:
        update = call.use.table.update
        flag = ~requests.refused[0]
        if update is not None and update.skip_nonfinite:
            # Sums of this many finite gradients are then finite.
            largest = jnp.max(jnp.abs(grads), initial=0) * lax.axis_size(everywhere)
            flag &= jnp.isfinite(largest)
        flags.append(flag)
    found = lax.pmin(jnp.stack(flags).astype(jnp.int32), everywhere) > 0
    return [found[k] for k in range(len(tables))]


def _to_replicas(table: Trained, allowed: jax.Array, copies: int) -> tuple[Route, jax.Array | None]:
    """The route to all replicas of the rows of a batch, and the row of every entry; None for one entry per row."""
    call, requests, *_ = table
    layout = sharded(call).layout
    if copies * layout.replicas == 1:
        route, source = requests.distinct.route, None
    else:
        given = replicas_of(layout, call.state[PAGES], requests.pages, copies)
        route, order = sorted_route(given)
        source = order // (copies * layout.replicas)
    if call.use.table.update is not None:
        route = route._replace(device=jnp.where(allowed, route.device, layout.devices * copies))
    return route, source


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
