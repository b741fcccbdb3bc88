"""Gradients and steps of one device for the pages that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._lookup import _groups
from jax_tt._lookup._groups import Call, Cotangents
from jax_tt._sharding.exchange import exchanged, over_rounds
from jax_tt._sharding.forward import Residuals, pool_call, read_call
from jax_tt._sharding.requests import PAGES, Requests, replicas_of, sharded
from jax_tt._sharding.route import Route, in_rounds, leading_bits, message_rows, sorted_route
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
        pool_call(call, own, rows)
        for call, own, rows in zip(calls, residuals.requests, residuals.rows, strict=True)
    ]
    found = _groups.backward(pools, residuals.pooled, gs, None)
    trained = [k for k, (grads, _) in enumerate(found) if grads]
    results: list[Cotangents] = [({}, dweights) for _, dweights in found]
    if not trained:
        return results
    gradients = [found[k][0]["embedding"][:-1] for k in trained]
    requests = [residuals.requests[k] for k in trained]
    own = [calls[k] for k in trained]
    states = _exchanged_steps(own, requests, gradients, residuals, (axes, others))
    for k, state in zip(trained, states, strict=True):
        results[k] = state, results[k][1]
    return results


def _exchanged_steps(
    calls: Sequence[Call],
    requests: Sequence[Requests],
    gradients: Sequence[jax.Array],
    residuals: Residuals,
    names: tuple[tuple[str, ...], tuple[str, ...]],
) -> list[dict[str, Any]]:
    axes, others = names
    everywhere = (*others, *axes)
    devices = lax.axis_size(everywhere)
    copies = devices // sharded(calls[0]).layout.devices
    allowed = _allowed(calls, requests, gradients, everywhere)
    routes, sources = zip(
        *(
            _to_replicas(call, own, copies, flag)
            for call, own, flag in zip(calls, requests, allowed, strict=True)
        ),
        strict=True,
    )
    sizes = [
        message_rows(route.row.shape[0], sharded(calls[0]).layout.devices * copies)
        for route in routes
    ]
    needed = [leading_bits(*pair, devices) for pair in zip(routes, sizes, strict=True)]
    bits = lax.pmax(jnp.max(jnp.stack(needed)), everywhere)
    places = [
        in_rounds(route, bits, size, devices) for route, size in zip(routes, sizes, strict=True)
    ]

    def turn(k: jax.Array, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        sent: list[jax.Array] = []
        for route, source, grads, size, (own, place) in zip(
            routes, sources, gradients, sizes, places, strict=True
        ):
            place = jnp.where(own == k, place, devices * size)
            number = jnp.full(devices * size, route.row.shape[0], jnp.int32)
            entries = lax.iota(jnp.int32, route.row.shape[0])
            number = number.at[place].set(entries, mode="drop", unique_indices=True)
            row = route.row.at[number].get(mode="fill", fill_value=-1)
            of_entry = source.at[number].get(mode="fill", fill_value=grads.shape[0])
            values = grads.at[of_entry].get(mode="fill", fill_value=0)
            sent += [row.reshape(devices, size), values.reshape(devices, size, -1)]
        got = exchanged(sent, everywhere)
        steps, given = [], []
        for call, rows, values, state in zip(calls, got[::2], got[1::2], states, strict=True):
            steps.append(read_call(call, rows.reshape(-1), {**call.state, **state}))
            given.append(values.reshape(-1, 1, values.shape[-1]))
        new = _groups.backward(steps, read, given, None)
        return [
            _added(call, state, now)
            for call, state, (now, _) in zip(calls, states, new, strict=True)
        ]

    read = residuals.read
    states = over_rounds(turn, bits, [_start(call) for call in calls])
    return [_finished(*parts) for parts in zip(calls, states, allowed, strict=True)]


def _allowed(
    calls: Sequence[Call],
    requests: Sequence[Requests],
    gradients: Sequence[jax.Array],
    everywhere: tuple[str, ...],
) -> list[jax.Array]:
    """Whether all devices allow the step of a table, so that they agree."""
    flags = []
    for call, own, grads in zip(calls, requests, gradients, strict=True):
        update = call.use.table.update
        flag = ~own.refused[0]
        if update is not None and update.skip_nonfinite:
            # Sums of this many finite gradients are then finite.
            largest = jnp.max(jnp.abs(grads), initial=0) * lax.axis_size(everywhere)
            flag &= jnp.isfinite(largest)
        flags.append(flag)
    found = lax.pmin(jnp.stack(flags).astype(jnp.int32), everywhere) > 0
    return [found[k] for k in range(len(calls))]


def _to_replicas(
    call: Call, requests: Requests, copies: int, allowed: jax.Array
) -> tuple[Route, jax.Array]:
    """The route to all replicas of the rows of a batch, and the row of the batch of every entry."""
    layout = sharded(call).layout
    rows = requests.distinct.route.row.shape[0]
    if copies * layout.replicas == 1:
        route, source = requests.distinct.route, lax.iota(jnp.int32, rows)
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
