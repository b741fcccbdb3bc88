"""The pooled sum whose backward pass updates the table: overwrite with gradient.

Forward is that of `_dispatch`. Backward runs gradient and optimizer in one op and returns, in place of the
table's cotangent, its new value. Residuals hold the old table; nothing reads it after the update, so a donated table
is updated in place.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt import _sentinel
from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch
from jax_tt._ops._dispatch import Wanted, instantiate, perturbed, values, weights_gradient
from jax_tt._ops._refuse import once
from jax_tt._ops._reverse_only import first_order
from jax_tt._ops._spec import Spec
from jax_tt._ops._table import FusedTable
from jax_tt._ops._vma import vary_over, varying_axes


@dataclasses.dataclass(frozen=True)
class Fused:
    """Static part of a fused call."""

    spec: Spec
    method: str
    kind: int
    skip_nonfinite: bool
    stochastic: bool
    axis_name: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_sum(
    call: Fused, table: FusedTable, weights: Any, batch: Batch, arrays: dict[str, jax.Array]
) -> jax.Array:
    """Weighted sums ``[S, nb, D]``; ``arrays`` holds hyper, inv_scale and seed of the update."""
    del arrays
    return _forward(call, table, dataclasses.replace(batch, weights=weights), False)[0]


def _forward(call: Fused, table: FusedTable, batch: Batch, save: bool) -> tuple[jax.Array, Any]:
    return _backend.forward(call.spec, table.cores, batch, call.method, save, table.sentinel)


def _fwd(call: Fused, table: Any, weights: Any, batch: Any, arrays: Any) -> tuple[Any, Any]:
    wanted = Wanted(perturbed(table), perturbed(weights))
    if wanted.cores:
        check_whole(call, table)
    table, weights, batch, arrays = values((table, weights, batch, arrays))
    batch = dataclasses.replace(batch, weights=weights)

    def forward(table: FusedTable, batch: Batch) -> tuple[jax.Array, Any]:
        return _forward(call, table, batch, wanted.cores)

    out, residuals = first_order(forward, table, batch)
    return out, (table, batch, residuals, arrays, wanted)


def _bwd(call: Fused, saved: Any, g: Any) -> tuple[Any, Any, None, None]:
    return first_order(partial(_cotangents, call), saved, instantiate(g))


def _cotangents(call: Fused, saved: Any, g: jax.Array) -> tuple[Any, Any, None, None]:
    table, batch, residuals, arrays, wanted = saved
    if not wanted.cores:
        if not wanted.weights:
            return None, None, None, None
        dweights = weights_gradient(call.spec, table.cores, batch, g, call.method)
        return None, dweights, None, None
    new, dweights = stepped(call, table, batch, residuals, arrays, g, wanted)
    return new, dweights, None, None


fused_sum.defvjp(_fwd, _bwd, symbolic_zeros=True)


def stepped(
    call: Fused,
    table: FusedTable,
    batch: Batch,
    residuals: Any,
    arrays: dict[str, jax.Array],
    g: jax.Array,
    wanted: Wanted,
) -> tuple[FusedTable, jax.Array | None]:
    """The table after the update with output gradient ``g``, and the gradient of the weights."""
    batch, g = once((batch, g), table.step)
    # Shards of a batch beside a replicated table: sum the gradients over them before the one update.
    axes = varying_axes(batch, g) - varying_axes(table)
    batch, g = vary_over((batch, g), varying_axes(batch, g))
    cores, slots, applied, dweights = _backend.update(
        call.spec,
        table.cores,
        table.slots,
        batch,
        residuals,
        g,
        arrays,
        call.method,
        kind=call.kind,
        skip_nonfinite=call.skip_nonfinite,
        stochastic=call.stochastic,
        want_weights=wanted.weights,
        axis_name=tuple(sorted(axes, key=str)) if axes else call.axis_name,
    )
    # A sentinel that was moved stays moved: refusing once is not enough. What rounding did to it does not add up.
    sentinel = jnp.where(_sentinel.holds(table.sentinel), 1, table.sentinel)
    # A constant of the program, by which the compiler sees that no table is to be kept.
    used = vary_over(jnp.ones((), jnp.float32), varying_axes(table.used))
    return FusedTable(cores, slots, table.step + applied, sentinel, used), dweights


def check_whole(call: Fused, table: Any) -> None:
    parts = jax.tree_util.tree_leaves_with_path(
        table, is_leaf=lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal)
    )
    missing = [jax.tree_util.keystr(path) for path, leaf in parts if not leaf.perturbed]
    if missing:
        label = "" if call.spec.name is None else f"{call.spec.name}: "
        raise ValueError(
            f"{label}table: a fused op was differentiated with respect to a part of its table; "
            f"{', '.join(missing)} would lose their update. Differentiate with respect to the whole FusedTable, or to "
            "none of it."
        )
