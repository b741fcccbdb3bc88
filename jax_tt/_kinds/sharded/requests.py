"""What one device requests of the others for its part of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ids.batch import Batch, present
from jax_tt._ids.id_space import digits_in_range
from jax_tt._ids.keys import keys_of
from jax_tt._ids.placement import Layout, Paged, paged
from jax_tt._kinds.sharded.route import Distinct, Route, distinct
from jax_tt._sets.owners import owners_of, words_of
from jax_tt._table.options import IGNORED, Lookup

if TYPE_CHECKING:
    from jax_tt._kinds.sharded.table import ShardedTable
    from jax_tt._table.groups import Call

# In a state: where the pages are.
PAGES = "page_table"


class Requests(NamedTuple):
    """The different rows of a batch.

    Attributes:
        distinct: where their first replicas for this device are, and the positions that request them.
        pages: of the different rows, -1 for none.
        read: the positions that read a row, ``[S * cap]``.
        here: the positions that are in the batch, ``[S, cap]``.
        refused: whether an id must not be in the batch, ``[1]``.
    """

    distinct: Distinct
    pages: Paged
    read: jax.Array
    here: jax.Array
    refused: jax.Array

    def only_if(self, allowed: jax.Array) -> Requests:
        """These requests, or none to be stepped."""
        pages = self.pages._replace(page=jnp.where(allowed, self.pages.page, -1))
        return self._replace(pages=pages)


class Positions(NamedTuple):
    """The positions of a batch.

    Attributes:
        route: the row of each of them, the first replica for this device.
        pages: of the rows.
        read, here, refused: as those of `Requests`; ``refused`` is a scalar.
    """

    route: Route
    pages: Paged
    read: jax.Array
    here: jax.Array
    refused: jax.Array


def requests_of(
    table: ShardedTable, page_table: jax.Array, batch: Batch, lookup: Lookup, axes: Any
) -> Requests:
    """The requests of this device.

    Args:
        table: divided over the devices.
        page_table: int32 ``[pages, replicas]``.
        batch: of this device.
        lookup: options of the call.
        axes: mesh axes that pages are divided over.
    """
    return _distinct(table, positions_of(table, page_table, batch, lookup, axes), lookup.method)


def positions_of(
    table: ShardedTable, page_table: jax.Array, batch: Batch, lookup: Lookup, axes: Any
) -> Positions:
    """Where the rows of this device's part of a batch are; the arguments are those of `requests_of`."""
    here = present(batch)
    if table.ids.takes_keys:
        own, refused = keys_in_pages(table.layout, keys_of(batch)), jnp.zeros((), bool)
        return _placed(table.layout, page_table, own, (here, here, refused), axes)
    (rows,), ok = digits_in_range(table.ids, batch)
    read = here & ok if lookup.bounds in (*IGNORED, "error") else here
    own = _paged(table.layout, jnp.where(read, rows, jnp.zeros_like(rows)))
    refused = jnp.any(here & ~ok) if lookup.bounds == "error" else jnp.zeros((), bool)
    return _placed(table.layout, page_table, own, (read, here, refused), axes)


def keys_in_pages(layout: Layout, keys: jax.Array) -> Paged:
    """The owners and words of keys uint32 ``[n, 2]``."""
    first, rest = words_of(keys)
    return Paged(owners_of(first, rest, layout.devices), first, rest)


def requested(
    table: ShardedTable,
    page_table: jax.Array,
    own: Paged,
    flags: tuple[jax.Array, jax.Array, jax.Array],
    method: str,
    axes: Any,
) -> Requests:
    """The requests for rows of pages; ``flags`` are `Requests.read`, `here` and `refused`."""
    return _distinct(table, _placed(table.layout, page_table, own, flags, axes), method)


def _placed(
    layout: Layout,
    page_table: jax.Array,
    own: Paged,
    flags: tuple[jax.Array, jax.Array, jax.Array],
    axes: Any,
) -> Positions:
    read, here, refused = flags
    read = read.reshape(-1)
    places = page_table[own.page]
    if layout.replicas == 1:
        place = places[:, 0]
    else:
        # Devices share the replicas of a page evenly.
        count = jnp.sum(places >= 0, axis=1, dtype=jnp.int32)
        turn = lax.axis_index(axes).astype(jnp.int32) % count
        place = jnp.take_along_axis(places, turn[:, None], axis=1)[:, 0]
    route = Route(
        jnp.where(read, place // layout.pool, layout.devices),
        place % layout.pool * layout.page_size + own.row,
        own.rest,
    )
    return Positions(route, own, read, here, refused)


def _distinct(table: ShardedTable, positions: Positions, method: str) -> Requests:
    route, own, read, here, refused = positions
    found = distinct(route, table.layout.devices, method)
    # Positions that read nothing are a request as well, for no page.
    wanted = own._replace(page=jnp.where(read, own.page, -1))
    pages = jax.tree.map(lambda part: part.at[found.source].get(mode="fill", fill_value=-1), wanted)
    return Requests(found, pages, read, here, refused[None])


def _paged(layout: Layout, rows: jax.Array) -> Paged:
    """The pages of rows ``[S, cap]`` of a batch, those of each position behind each other."""
    if layout.columns == 1:
        return paged(layout, rows.reshape(-1))
    shard = lax.iota(jnp.int32, rows.shape[0]) % layout.columns
    page = jnp.broadcast_to(shard[:, None], rows.shape)
    return Paged(page.reshape(-1), rows.reshape(-1).astype(jnp.int32))


def replicas_of(layout: Layout, page_table: jax.Array, pages: Paged, others: int) -> Route:
    """Where all replicas of rows are, ``[rows * replicas * others]``, also on the ``others`` times as many devices."""
    devices = layout.devices * others
    places = jnp.where((pages.page >= 0)[:, None], page_table[pages.page], -1)
    first = layout.devices * jnp.arange(others, dtype=jnp.int32)
    device = places[:, :, None] // layout.pool + first[None, None]
    device = jnp.where(places[:, :, None] >= 0, device, devices)
    row = places % layout.pool * layout.page_size + pages.row[:, None]

    def of_all(values: jax.Array) -> jax.Array:
        return jnp.broadcast_to(values[:, :, None], device.shape).reshape(-1)

    rest = None if pages.rest is None else of_all(jnp.broadcast_to(pages.rest[:, None], row.shape))
    return Route(device.reshape(-1), of_all(row), rest)


def sharded(call: Call) -> ShardedTable:
    """The table of a call of a `ShardedGroup`."""
    table: Any = call.use.table
    return table
