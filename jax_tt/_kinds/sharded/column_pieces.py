"""Column shards from whole rows that are divided over the devices, and the other way, for checkpoints and moves.

Each column shard moves as a table of its own whose rows are all on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._ids.placement import Layout

Arrays = Mapping[str, jax.Array]
# ``move(arrays, before, pages, after)``: the arrays of rows in another layout.
Move = Callable[[Arrays, Layout, jax.Array, Layout], dict[str, jax.Array]]


def rows_of_columns(
    arrays: Arrays, layout: Layout, pages: jax.Array, whole: Layout, move: Move
) -> dict[str, jax.Array]:
    """Whole rows in the layout ``whole``.

    Args:
        arrays: ``[devices * N, D / k]`` by name.
        layout, pages: where the column shards are.
        whole: of the rows.
        move: for tables of N rows.
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
    """The inverse of `rows_of_columns`; ``whole`` also has its pages, and ``place`` divides an array of rows."""
    found: dict[str, jax.Array] = {}
    rows, pages = whole
    device = jnp.arange(layout.devices, dtype=jnp.int32)
    device = place(
        jnp.repeat(device, layout.rows, total_repeat_length=layout.devices * layout.rows)
    )
    for k in range(layout.columns):
        own = {name: jnp.split(array, layout.columns, axis=1)[k] for name, array in arrays.items()}
        shard = _of_shard(layout, k)
        here = (device == int(shard.page_table[0, 0]))[:, None]
        for name, array in move(own, rows, pages, shard).items():
            found[name] = jnp.where(here, array, found[name]) if name in found else array
    return found


def _of_shard(layout: Layout, k: int) -> Layout:
    """The layout of one column shard. Every device has room for one."""
    owner: Any = int(layout.page_table[k, 0])
    return Layout.of(layout.page_size, [(owner,)], layout.devices, hashed=False, columns=1)
