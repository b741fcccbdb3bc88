"""The backward pass of one device: gradients and steps of the rows that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._kinds.sharded.columns import in_columns, joined_weights, separated_columns
from jax_tt._kinds.sharded.exchange import unless
from jax_tt._kinds.sharded.forward import Attempt, all_requests, attempted, with_batches
from jax_tt._kinds.sharded.local import received_call
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._kinds.sharded.spread import sent_gradients
from jax_tt._kinds.sharded.steps import Trained, exchanged_steps
from jax_tt._table import groups
from jax_tt._table.groups import Call, Cotangents
from jax_tt._table.reference import Step
from jax_tt._table.wrapper import innermost

# What an attempt changes: by table, rows or summed gradients, whether it is stepped, and gradients of weights.
Carried = tuple[list[dict[str, jax.Array]], list[jax.Array], list[jax.Array | None]]


def local_backward(calls: Sequence[Call], first: Attempt, gs: Sequence[Any]) -> list[Cotangents]:
    """The cotangents of every call for this device, after the ``first`` attempt of the forward pass."""
    calls = [in_columns(call) for call in calls]
    gs = [
        None if g is None else separated_columns(call, g) for call, g in zip(calls, gs, strict=True)
    ]

    def stepped(attempt: Attempt, states: Sequence[dict[str, Any]], wanted: jax.Array) -> Carried:
        return _attempted(calls, attempt, gs, states, wanted)

    def again(carried: Carried, batches: Sequence[Batch]) -> Carried:
        # The first attempt changed nothing. To read the arrays from before it, XLA would keep a copy of them.
        states, present = carried[0], with_batches(calls, batches)
        for k, (call, state) in enumerate(zip(calls, states, strict=True)):
            if call.use.table.update is not None:
                present[k] = present[k]._replace(state={**call.state, **state})
        _, attempt = attempted(present, all_requests(present))
        return stepped(attempt, states, jnp.ones((), bool))

    # Arrays of rows are only changed once the forward pass has read them, since `fits` is known after that.
    fits = jnp.ones((), bool) if first.fits is None else first.fits[0]
    start = [{} if g is None else _start(call) for call, g in zip(calls, gs, strict=True)]
    carried = stepped(first, start, fits)
    if first.fits is not None:
        carried, _ = unless(fits, again, carried, [call.batch for call in calls])
    return [
        (_finished(call, state, allowed) if state else {}, joined_weights(call, dweights))
        for call, state, allowed, dweights in zip(calls, *carried, strict=True)
    ]


def _attempted(
    calls: Sequence[Call],
    attempt: Attempt,
    gs: Sequence[Any],
    states: Sequence[dict[str, Any]],
    wanted: jax.Array,
) -> Carried:
    """The attempt, which changes nothing unless it is ``wanted``."""
    fetched = {k: one for k, one in enumerate(attempt.fetched) if one is not None}
    pools = [received_call(calls[k], one.batch, one.rows) for k, one in fetched.items()]
    cotangents = groups.backward(pools, attempt.pooled, [gs[k] for k in fetched], None)
    of_rows = dict(zip(fetched, cotangents, strict=True))
    trained = []
    for k, (call, g) in enumerate(zip(calls, gs, strict=True)):
        accum = accumulator(sharding_of(call).rows.spec.storage(call.state))
        kind = sharding_of(call).exchange.type_of_sums(accum)
        if k not in of_rows:
            if g is not None:
                trained.append(Trained(k, call, sent_gradients(call, g).astype(kind)))
        elif of_table := of_rows[k][0]:
            grads = of_table["embedding"][: fetched[k].rows.shape[0]]
            trained.append(Trained(k, call, grads.astype(kind)))
    allowed, of_sums = [wanted] * len(calls), {}
    if trained:
        stepped = exchanged_steps(calls, trained, states, attempt, wanted)
        states, allowed, of_sums = stepped
    weights = [of_rows[k][1] if k in of_rows else of_sums.get(k) for k in range(len(calls))]
    return list(states), allowed, weights


def _start(call: Call) -> dict[str, Any]:
    """What rounds add gradients to or step: zeros, or the arrays of rows; nothing if only weights have gradients."""
    table: Any = call.use.table
    if not call.use.lookup.wanted.names:
        return {}
    if table.update is None:
        return {
            name: jnp.zeros_like(
                call.state[name], jnp.promote_types(call.state[name].dtype, jnp.float32)
            )
            for name in table.spec.param_names
        }
    return {name: call.state[name] for name in table.row_arrays}


def _finished(call: Call, state: dict[str, Any], allowed: jax.Array) -> dict[str, Any]:
    table = call.use.table
    if table.update is None:
        return state
    local, applied = sharding_of(call).rows, allowed.astype(jnp.float32)
    params, slots = local.spec.params(state), local.spec.stepped_slots(state)
    values = {**call.values, "allowed": applied}
    step = Step(call.batch, applied, call.use.lookup, values)
    stepped = params, slots, jnp.ones((), jnp.float32), None
    return innermost(local).after_step(call.state, step, *stepped)[0]
