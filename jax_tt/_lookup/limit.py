"""Limits of the gradients of looked-up rows, for the steps of their tables and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import as_scalar
from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._lookup.combine import combine
from jax_tt._table import groups
from jax_tt._table.concat_layout import ConcatLayout
from jax_tt._table.distinct_rows import never
from jax_tt._table.groups import Call, Gradients
from jax_tt._table.options import Lookup, NeededCotangents, Update
from jax_tt._table.table import Table


def limit_of(update: Update, grad_scale: Any, storage: Any) -> jax.Array:
    """The limit of an update, in units of the loss as it is scaled; a scalar."""
    most = jnp.asarray(update.max_gradient, accumulator(storage))
    if grad_scale is None:
        return most
    return most * lax.stop_gradient(jnp.asarray(as_scalar("grad_scale", grad_scale), most.dtype))


def limit_of_sums(limit: jax.Array, lookup: Lookup, table: Table, batch: Batch) -> jax.Array:
    """The limit for the sums ``[S, nb, D]`` of a batch, of which `combine` makes the rows that ``limit`` is for.

    It is a scalar or ``[S, nb, 1]``.
    """
    if lookup.combiner in ("sum", "max"):
        return limit
    of_bags = jnp.broadcast_to(limit, (batch.num_segments, batch.num_bags, 1))
    # A negative sum of weights changes the sign of gradients.
    return jnp.abs(lax.stop_gradient(combine(lookup, table, batch, of_bags)))


def rearranged(function: Callable[[jax.Array], Any], shape: tuple[int, ...], limits: Any) -> Any:
    """The limits for the argument of ``function``, of this shape, from those for its results, to which it is moved."""

    def pulled(limits: Any) -> jax.Array:
        like = jnp.zeros(shape, jax.tree.leaves(limits)[0].dtype)
        return jax.vjp(function, vary_over(like, varying_axes(limits)))[1](limits)[0]

    return over_explicit_axes(pulled, limits, P())


def limited_gradients(
    calls: Sequence[Call], residuals: Sequence[Any], gs: Gradients, wide: ConcatLayout | None
) -> tuple[Sequence[Call], Gradients, Sequence[jax.Array | None]]:
    """What `groups.backward` is given in place of ``calls`` and ``gs``, so that steps respect the limits of the calls.

    The gradients of weights that it must not compute, since they have no limits, are the third result.
    """
    limited = [call.limit is not None and bool(call.use.lookup.wanted.names) for call in calls]
    dweights: Sequence[jax.Array | None] = [None] * len(calls)
    if not any(limited):
        return calls, gs, dweights
    alone = [
        limits and call.use.lookup.wanted.weights
        for call, limits in zip(calls, limited, strict=True)
    ]
    if any(alone):
        of_weights = [
            call._replace(use=call.use.wanting(NeededCotangents(weights=asks)))
            for call, asks in zip(calls, alone, strict=True)
        ]
        asked = (
            [g if asks else None for g, asks in zip(gs, alone, strict=True)] if wide is None else gs
        )
        found = groups.backward(of_weights, residuals, asked, wide)
        dweights = [given for _, given in found]
        # Steps change tables in place, after these have read them.
        late = never(dweights, None)
        gs = jax.tree.map(lambda g: jnp.where(late, 0, g), gs)
        calls = [
            call._replace(use=call.use.wanting(NeededCotangents(call.use.lookup.wanted.names)))
            if asks
            else call
            for call, asks in zip(calls, alone, strict=True)
        ]
    each = gs if wide is None else wide.separated(gs, [call.shape for call in calls])
    each = [
        _clipped(call, g) if limits and g is not None else g
        for call, g, limits in zip(calls, each, limited, strict=True)
    ]
    return calls, each if wide is None else wide.joined(each), dweights


def _clipped(call: Call, g: jax.Array) -> jax.Array:
    update = call.use.table.update
    assert update is not None and call.limit is not None
    most = jnp.broadcast_to(call.limit.astype(g.dtype), g.shape)
    limited = jnp.clip(g, -most, most)
    # What is not finite is left for the update to find.
    return jnp.where(jnp.isfinite(g), limited, g) if update.skip_nonfinite else limited
