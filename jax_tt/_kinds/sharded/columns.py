"""Column shards: every device looks up the whole batch in its columns of the rows.

To the exchange, the ``k`` column shards of a table are a table of ``k`` times as many rows, whose first N rows are the
first shard. A segment of a batch becomes ``k`` segments with the same ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._ids.placement import Layout
from jax_tt._kinds.sharded.sharding import sharding_of
from jax_tt._table.groups import Call

Arrays = Mapping[str, jax.Array]
# ``move(arrays, before, pages, after)`` moves the rows of arrays from one layout to another.
Move = Callable[[Arrays, Layout, jax.Array, Layout], dict[str, jax.Array]]


def in_columns(call: Call) -> Call:
    """Repeats every segment of a call for each column shard: segment ``s`` becomes ``k * s`` to ``k * s + k - 1``."""
    count = sharding_of(call).layout.columns
    if count == 1:
        return call

    def repeated(array: Any) -> Any:
        return None if array is None else jnp.repeat(array, count, axis=0)

    batch = call.batch
    arrays = {name: repeated(getattr(batch, name)) for name in ("ids", "offsets", "weights")}
    return call._replace(batch=dataclasses.replace(batch, **arrays, slots=None))


def joined_columns(call: Call, sums: jax.Array) -> jax.Array:
    """Joins the sums of a call of `in_columns`, ``[k * S, nb, D / k]`` to ``[S, nb, D]``."""
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


def joined_weights(call: Call, gradient: jax.Array | None) -> jax.Array | None:
    """Adds the gradients of weights over the column shards, ``[k * S, cap]`` to ``[S, cap]``."""
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


def rows_of_columns(
    arrays: Arrays, layout: Layout, pages: jax.Array, whole: Layout, move: Move
) -> dict[str, jax.Array]:
    """Joins column shards, arrays ``[devices * N, D / k]`` by name, to whole rows that are sharded as ``whole`` says.

    Each column shard moves as a table of its columns, whose N rows are all on one device.
    """
    parts = [
        move(arrays, _of_shard(layout, k), pages[k : k + 1], whole) for k in range(layout.columns)
    ]
    return {name: jnp.concatenate([part[name] for part in parts], axis=1) for name in arrays}


def columns_of_rows(
    arrays: Arrays,
    layout: Layout,
    whole: tuple[Layout, jax.Array],
    move: Move,
    place: Callable[[jax.Array], jax.Array],
) -> dict[str, jax.Array]:
    """The inverse of `rows_of_columns`; ``whole`` is a layout and its pages, and ``place`` shards an array of rows."""
    shards: dict[str, jax.Array] = {}
    rows, pages = whole
    device = jnp.arange(layout.devices, dtype=jnp.int32)
    device = place(
        jnp.repeat(device, layout.rows, total_repeat_length=layout.devices * layout.rows)
    )
    for k in range(layout.columns):
        parts = {name: jnp.split(x, layout.columns, axis=1)[k] for name, x in arrays.items()}
        shard = _of_shard(layout, k)
        here = (device == int(shard.page_table[0, 0]))[:, None]
        for name, array in move(parts, rows, pages, shard).items():
            shards[name] = jnp.where(here, array, shards[name]) if name in shards else array
    return shards


def _of_shard(layout: Layout, k: int) -> Layout:
    """The layout of one column shard. Every device has room for one."""
    owner: Any = int(layout.page_table[k, 0])
    return Layout.of(layout.page_size, [(owner,)], layout.devices, hashed=False, columns=1)
