"""Moves the rows of arrays from one layout of pages to another, a block at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_tt._base.dtypes import x64_enabled
from jax_tt._base.words import mix
from jax_tt._ids.placement import Layout, Paged, paged
from jax_tt._kinds.sharded.exchange import exchanged, other_rounds
from jax_tt._kinds.sharded.programs import Local, over_devices
from jax_tt._kinds.sharded.route import (
    Messages,
    Route,
    all_messages,
    distinct,
    kept_places,
    message_rows,
)

# Rows that a device asks for at a time.
_BLOCK = 2**16


def moved_rows(
    arrays: Mapping[str, jax.Array],
    pages: tuple[jax.Array, jax.Array],
    layouts: tuple[Layout, Layout],
    num_embeddings: int,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> dict[str, jax.Array]:
    """Moves arrays ``[devices * rows, ...]`` from the first layout to the second, each with its page table.

    No device ever has more than its pools and a block. Rows are sharded over ``axes`` of the mesh, all of whose axes
    are automatic.
    """
    before, after = layouts
    static = before, Blocks(after, min(after.rows, _BLOCK), num_embeddings, axes)
    run = over_devices(Local(_moved_on_device, static), mesh, (P(axes), P(), P()), P(axes))
    return run(dict(arrays), *pages)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of the rows of one device, of ``size`` rows, for a table that is sharded over ``axes`` in a layout."""

    layout: Layout
    size: int
    num_embeddings: int
    axes: Any

    def filled(
        self,
        arrays: Any,
        page_table: jax.Array,
        values: Callable[[jax.Array, jax.Array], Any],
    ) -> Any:
        """Fills arrays of rows ``[rows, ...]`` of this device, a block at a time.

        ``values`` takes rows of the table and whether they exist, both ``[size]``, and returns entries ``[size, ...]``.
        """
        rows, size = self.layout.rows, self.size
        device = lax.axis_index(self.axes).astype(jnp.int32)
        page_at = pages_at(self.layout, page_table)

        def block(k: jax.Array, arrays: Any) -> Any:
            # The last block is shifted back, so that all of them have the same size.
            begin = jnp.minimum(k * size, rows - size)
            places = begin + lax.iota(jnp.int32, size)
            entries = values(*rows_at(self.layout, page_at, device, places, self.num_embeddings))
            return jax.tree.map(
                lambda array, new: lax.dynamic_update_slice_in_dim(array, new, begin, 0),
                arrays,
                entries,
            )

        return lax.fori_loop(0, -(-rows // size), block, arrays)


def _moved_on_device(before: Layout, blocks: Blocks, *given: Any) -> dict[str, jax.Array]:
    """The rows of this device in the layout of ``blocks``."""
    arrays, old, new = given

    def values(rows: jax.Array, here: jax.Array) -> dict[str, jax.Array]:
        return _fetched(before, old, arrays, rows, here, blocks.axes)

    start = {
        name: jnp.zeros((blocks.layout.rows, *array.shape[1:]), array.dtype)
        for name, array in arrays.items()
    }
    return blocks.filled(start, new, values)


def pages_at(layout: Layout, page_table: jax.Array) -> jax.Array:
    """The page at every place of all pools, -1 for none."""
    count = layout.devices * layout.pool
    numbers = jnp.broadcast_to(
        jnp.arange(layout.num_pages, dtype=jnp.int32)[:, None], page_table.shape
    )
    places = jnp.where(page_table < 0, count, page_table)
    return jnp.full(count, -1, jnp.int32).at[places].set(numbers, mode="drop")


def rows_at(
    layout: Layout, page_at: jax.Array, device: jax.Array, places: jax.Array, num_embeddings: int
) -> tuple[jax.Array, jax.Array]:
    """The rows of the table at entries of a device's arrays, and whether there is one."""
    page = page_at[device * layout.pool + places // layout.page_size]
    return rows_of(layout, Paged(page, places % layout.page_size), num_embeddings)


def rows_of(layout: Layout, places: Paged, num_embeddings: int) -> tuple[jax.Array, jax.Array]:
    """The rows of the table at places of pages, and whether there is one; the inverse of `paged`."""
    page, row, _ = places
    # A number of the form high * factor + low.
    high, factor, low = page, layout.page_size, row
    if layout.hashed:
        pages = np.int32(layout.num_pages)
        turn = (mix(row.astype(jnp.uint32)) % np.uint32(layout.num_pages)).astype(jnp.int32)
        high, factor, low = row, layout.num_pages, (page - turn) % pages
    last, most = divmod(num_embeddings - 1, factor)
    here = (page >= 0) & ((high < last) | ((high == last) & (low <= most)))
    wide = row_numbers(num_embeddings)
    rows = high.astype(wide) * np.asarray(min(factor, int(jnp.iinfo(wide).max)), wide)
    return jnp.where(here, rows + low.astype(wide), jnp.zeros_like(rows)), here


def row_numbers(num_embeddings: int) -> Any:
    """The type of the numbers of all rows of a table."""
    if num_embeddings <= 2**31:
        return jnp.int32
    if num_embeddings <= 2**32:
        return jnp.uint32
    if not x64_enabled():
        raise ValueError(
            f"num_embeddings: got {num_embeddings} rows that move between devices; expected at most 2**32 without "
            "jax_enable_x64. Turn it on."
        )
    return jnp.int64


def _fetched(
    layout: Layout,
    page_table: jax.Array,
    arrays: Mapping[str, jax.Array],
    rows: jax.Array,
    here: jax.Array,
    axes: Any,
) -> dict[str, jax.Array]:
    """Rows ``[n]`` of the arrays of all devices, zeros where there are none."""
    page, row, _ = paged(layout, rows)
    place = page_table[page, 0]
    device = jnp.where(here, place // layout.pool, layout.devices)
    requests = Route(device, place % layout.pool * layout.page_size + row)
    different = distinct(requests, layout.devices, "auto")
    size = message_rows(rows.shape[0], layout.devices)
    (messages,), bits = all_messages([different.route], [size], layout.devices, axes)
    kept = kept_places(messages, bits, layout.devices)
    answers = functools.partial(_answers, list(arrays.values()), different.route, messages, axes)

    def other(k: jax.Array, held: Sequence[jax.Array]) -> list[jax.Array]:
        pairs = zip(held, answers(k), strict=True)
        return [messages.with_round(*pair, kept, k, layout.devices) for pair in pairs]

    held = other_rounds(other, bits, answers(0))
    at = kept[different.places]
    return {
        name: table.at[at].get(mode="fill", fill_value=0)
        for name, table in zip(arrays, held, strict=True)
    }


def _answers(
    arrays: Sequence[jax.Array], route: Route, messages: Messages, axes: Any, k: Any
) -> list[jax.Array]:
    """The rows of round ``k`` in the order of its messages."""
    devices = lax.axis_size(axes)
    row = route.row.at[messages.sent(k, devices)].get(mode="fill", fill_value=-1)
    (asked,) = exchanged([row.reshape(devices, -1)], axes)
    parts = [
        array.at[asked].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        for array in arrays
    ]
    received = [exchanged([part], axes)[0] for part in parts]
    return [part.reshape(-1, *part.shape[2:]) for part in received]
