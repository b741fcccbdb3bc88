"""Gradients of the weights of bags whose sums travel: the owners of rows compute them, and send them back."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import present
from jax_tt._kinds.sharded.exchange import exchanged
from jax_tt._kinds.sharded.requests import Requests
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._kinds.sharded.spread import Spread
from jax_tt._table.groups import Call


def returned_weights(
    calls: Sequence[Call],
    asks: Sequence[Requests | Spread],
    gradients: Sequence[jax.Array | None],
) -> dict[int, jax.Array]:
    """``row . g`` of every position ``[S, cap]``, by the number of a call.

    Args:
        calls: in columns.
        asks: what was sent.
        gradients: of the weights that have arrived here, ``[devices, size]``, or None.
    """
    spreads: dict[int, Spread] = {}
    sent = []
    for k, (call, ask, g) in enumerate(zip(calls, asks, gradients, strict=True)):
        if isinstance(ask, Spread) and g is not None:
            spreads[k] = ask
            sent.append(g.astype(call.batch.weights.dtype))
    back = exchanged(sent, sharding_of(calls[0]).axes) if sent else []
    return {
        k: _of_positions(calls[k], spread, own)
        for (k, spread), own in zip(spreads.items(), back, strict=True)
    }


def _of_positions(call: Call, spread: Spread, gradients: jax.Array) -> jax.Array:
    """The gradients where the ids were; 0 for ids that have no owner, since they are not read."""
    nothing = jnp.zeros(call.batch.ids.shape[:2], gradients.dtype)
    if call.use.lookup.bounds == "error":
        # Ids that must not be in the batch have no owner, and rows of NaN.
        nothing = jnp.where(present(call.batch), jnp.nan, nothing)
    found = nothing.reshape(-1).at[spread.places.source].set(gradients, mode="drop")
    return found.reshape(nothing.shape)
