"""Pure JAX versions of the native ops, for any kind of table: always available, differentiable, the test oracle.

Every function takes the canonical `Batch` and works in the accumulator type (float32, or float64 for float64).
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base import sentinel as _sentinel
from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch, pool, present
from jax_tt._jax.rounding import of_array, round_to
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._table.ids import digits_in_range, outside
from jax_tt._table.options import IGNORED, Lookup

if TYPE_CHECKING:
    from jax_tt._table.table import Table
    from jax_tt._table.types import Params, Slots, State


def rows(table: Table, params: Params, batch: Batch, lookup: Lookup) -> jax.Array:
    """Row of every position ``[S, cap, D]``, with bounds applied; 0 for positions that are not present."""
    digits, ok = digits_in_range(table, batch)
    value = table.rows(params, digits, lookup.precision)
    here = present(batch)
    if lookup.bounds in IGNORED:
        here = here & ok
    elif lookup.bounds == "error":
        value = jnp.where(ok[..., None], value, jnp.nan)
    return jnp.where(here[..., None], value, 0)


def forward(
    table: Table, params: Params, batch: Batch, lookup: Lookup, sentinel: jax.Array | None = None
) -> jax.Array:
    """Weighted sums of rows ``[S, nb, D]``, all NaN if the sentinel is invalid."""
    value = rows(table, params, batch, lookup)
    if batch.weights is not None:
        # A position that is not present may have any weight, including NaN.
        weights = jnp.where(present(batch), batch.weights, 0).astype(value.dtype)
        value = value * weights[..., None]
    sums = pool(batch, value)
    return sums if sentinel is None else jnp.where(_sentinel.holds(sentinel), sums, jnp.nan)


def backward(
    table: Table, params: Params, batch: Batch, g: jax.Array, lookup: Lookup
) -> tuple[Params, jax.Array | None]:
    """Gradients of `forward` in the accumulator type, for this shard of the batch only."""
    accum = accumulator(params[0].dtype)
    # Marked as varying, replicated parameters get the gradient of this shard only.
    wide = vary_over(tuple(param.astype(accum) for param in params), varying_axes(batch, g))

    def pooled(wide: Params, weights: Any) -> jax.Array:
        return forward(table, wide, dataclasses.replace(batch, weights=weights), lookup)

    if lookup.wanted.weights:
        _, pullback = jax.vjp(pooled, wide, batch.weights)
        grads, dweights = pullback(g.astype(accum))
        return tuple(grads), dweights
    _, pullback = jax.vjp(lambda wide: pooled(wide, batch.weights), wide)
    (grads,) = pullback(g.astype(accum))
    return tuple(grads), None


def update(
    table: Table,
    state: State,
    batch: Batch,
    g: jax.Array,
    lookup: Lookup,
    values: dict[str, jax.Array],
) -> tuple[Params, Slots, jax.Array, jax.Array | None]:
    """Gradient and one optimizer step on the touched rows.

    Returns:
        New parameters and slots; 0.0 if the batch itself prevents the step, regardless of ``values["allowed"]``,
        otherwise 1.0; and the gradient of the weights, computed with the rows before the step.
    """
    grads, dweights = backward(table, table.params(state), batch, g, lookup)
    return *stepped(table, state, batch, grads, lookup, values), dweights


def stepped(
    table: Table,
    state: State,
    batch: Batch,
    grads: Params,
    lookup: Lookup,
    values: dict[str, jax.Array],
) -> tuple[Params, Slots, jax.Array]:
    """One optimizer step on the touched rows, with the gradients of this shard.

    Gradients are summed over ``lookup.axis_name`` first. Returns what `update` does, without the last.
    """
    assert table.update is not None
    params, slots = table.params(state), table.stepped_slots(state)
    touched = table.touched(batch, lookup)
    if lookup.axis_name is not None:
        grads = lax.psum(grads, lookup.axis_name)
        touched = [lax.psum(rows.astype(jnp.int32), lookup.axis_name) > 0 for rows in touched]
    grads = tuple(grad * values["inv_scale"].astype(grad.dtype) for grad in grads)
    applied = ~poisoned(table, batch, lookup, lookup.axis_name)
    if table.update.skip_nonfinite:
        applied &= jnp.all(jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads]))
    key = jax.random.wrap_key_data(values["seed"], impl="threefry2x32")
    stochastic = table.update.rounds_stochastically(params[0].dtype)
    new_params, new_slots = [], []
    for k, (param, slot, grad, rows_touched) in enumerate(
        zip(params, slots, grads, touched, strict=True)
    ):
        flat = param.reshape(param.shape[0], math.prod(param.shape[1:]))
        old = flat.astype(grad.dtype)
        new, stepped = table.update.optimizer.update_rows(
            old, grad.reshape(flat.shape), slot, values["hyper"]
        )
        own_key = jax.random.fold_in(key, k) if stochastic else None
        new = round_to(new, param.dtype, own_key)
        stepped = [
            round_to(now, was.dtype, of_array(own_key, 1 + j))
            for j, (now, was) in enumerate(zip(stepped, slot, strict=True))
        ]
        keep = rows_touched & applied & (values["allowed"] != 0)
        new_params.append(jnp.where(keep[:, None], new, flat).reshape(param.shape))
        new_slots.append(
            tuple(
                jnp.where(keep if now.ndim == 1 else keep[:, None], now, was)
                for now, was in zip(stepped, slot, strict=True)
            )
        )
    return tuple(new_params), tuple(new_slots), applied.astype(jnp.float32)


def poisoned(table: Table, batch: Batch, lookup: Lookup, axes: Any) -> jax.Array:
    """Whether any shard has an id that makes its bag NaN, so that the gradients of the batch are meaningless."""
    if lookup.bounds != "error":
        return jnp.zeros((), bool)
    found = jnp.any(outside(table, batch))
    return lax.psum(found.astype(jnp.int32), axes) > 0 if axes else found


def touched(table: Table, batch: Batch, lookup: Lookup) -> list[jax.Array]:
    """Whether the batch reads each row of each parameter, regardless of the gradient; bool ``[rows]`` each."""
    digits, ok = digits_in_range(table, batch)
    here = present(batch)
    if lookup.bounds in (*IGNORED, "error"):
        here = here & ok
    found = []
    for digit, factor in zip(digits, table.radices, strict=True):
        count = jnp.zeros(factor, jnp.int32).at[digit]
        count = count.max(here.astype(jnp.int32), mode="drop", wrap_negative_indices=False)
        found.append(count > 0)
    return found
