"""Tables whose columns are divided: every device looks up the whole batch in its own columns.

To the exchange, the ``k`` column shards of a table are a table of ``k`` times as many rows. Rows of the first N are the
first shard. A segment of a batch becomes ``k`` segments with the same ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._table.groups import Call


def in_columns(call: Call) -> Call:
    """The call with segment ``s`` for the first column shard as segment ``k * s``, and so on."""
    count = sharding_of(call).layout.columns
    if count == 1:
        return call

    def repeated(array: Any) -> Any:
        return None if array is None else jnp.repeat(array, count, axis=0)

    batch = call.batch
    own = {name: repeated(getattr(batch, name)) for name in ("ids", "offsets", "weights")}
    return call._replace(batch=dataclasses.replace(batch, **own, slots=None))


def joined_columns(call: Call, sums: jax.Array) -> jax.Array:
    """Sums ``[S, nb, D]`` from those of `in_columns`."""
    count = sharding_of(call).layout.columns
    if count == 1:
        return sums
    segments, bags, width = sums.shape
    parts = sums.reshape(segments // count, count, bags, width).transpose(0, 2, 1, 3)
    return parts.reshape(segments // count, bags, count * width)


def separated_columns(call: Call, sums: jax.Array) -> jax.Array:
    """The inverse of `joined_columns`."""
    count = sharding_of(call).layout.columns
    if count == 1:
        return sums
    segments, bags, width = sums.shape
    parts = sums.reshape(segments, bags, count, width // count).transpose(0, 2, 1, 3)
    return parts.reshape(segments * count, bags, width // count)


def of_weights(call: Call, gradient: jax.Array | None) -> jax.Array | None:
    """The gradient of weights ``[S, cap]`` from that of the weights of `in_columns`."""
    count = sharding_of(call).layout.columns
    if gradient is None or count == 1:
        return gradient
    return jnp.sum(gradient.reshape(-1, count, gradient.shape[-1]), axis=1)


def rows_of_shards(array: jax.Array, count: int) -> jax.Array:
    """``[k * N, D / k]`` from ``[N, D]``."""
    if count == 1:
        return array
    rows, width = array.shape
    parts = array.reshape(rows, count, width // count).transpose(1, 0, 2)
    return parts.reshape(count * rows, width // count)


def rows_of_table(array: jax.Array, count: int) -> jax.Array:
    """The inverse of `rows_of_shards`."""
    if count == 1:
        return array
    rows, width = array.shape
    parts = array.reshape(count, rows // count, width).transpose(1, 0, 2)
    return parts.reshape(rows // count, count * width)
