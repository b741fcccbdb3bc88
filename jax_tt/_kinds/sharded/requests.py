"""The rows that one device requests of the others for its part of a batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._directories.hashing import owners_of, words_of
from jax_tt._ids.batch import present
from jax_tt._ids.id_space import digits_in_range
from jax_tt._ids.keys import keys_of
from jax_tt._ids.placement import Layout, Paged, paged
from jax_tt._kinds.sharded.route import DistinctRows, Route, distinct
from jax_tt._kinds.sharded.sharding import PAGES, Sharding, sharding_of
from jax_tt._table.groups import Call
from jax_tt._table.options import IGNORED


class RowRequests(NamedTuple):
    """The different rows of a batch.

    Attributes:
        distinct: the route to the replica that this device reads, and the positions that request each row.
        pages: the pages of the different rows, -1 for none.
        read: the positions that read a row, ``[S * cap]``.
        here: the positions that are in the batch, ``[S, cap]``.
        refused: whether an id must not be in the batch, ``[1]``.
    """

    distinct: DistinctRows
    pages: Paged
    read: jax.Array
    here: jax.Array
    refused: jax.Array

    def only_if(self, allowed: jax.Array) -> RowRequests:
        """These requests, or none to be stepped."""
        pages = self.pages._replace(page=jnp.where(allowed, self.pages.page, -1))
        return self._replace(pages=pages)


class Positions(NamedTuple):
    """The positions of a batch: the row of each in the replica that this device reads, and the page of the row.

    ``read``, ``here`` and ``refused``, a scalar, are as in `RowRequests`.
    """

    route: Route
    pages: Paged
    read: jax.Array
    here: jax.Array
    refused: jax.Array


def row_requests(call: Call) -> RowRequests:
    """The different rows that this device requests for its part of a batch."""
    return _distinct(sharding_of(call), positions_of(call), call.use.lookup.method)


def requests_of_keys(
    sharding: Sharding, page_table: jax.Array, keys: jax.Array, here: jax.Array, method: str
) -> RowRequests:
    """The different keys among keys uint32 ``[n, 2]``, of which the ones that are ``here`` count."""
    return _distinct(sharding, _positions_of_keys(sharding, page_table, keys, here), method)


def positions_of(call: Call) -> Positions:
    """Where the rows of this device's part of a batch are."""
    sharding, batch, bounds = sharding_of(call), call.batch, call.use.lookup.bounds
    here = present(batch)
    if sharding.ids.takes_keys:
        return _positions_of_keys(sharding, call.state[PAGES], keys_of(batch), here)
    (rows,), ok = digits_in_range(sharding.ids, batch)
    read = here & ok if bounds in (*IGNORED, "error") else here
    pages = _paged(sharding.layout, jnp.where(read, rows, jnp.zeros_like(rows)))
    refused = jnp.any(here & ~ok) if bounds == "error" else jnp.zeros((), bool)
    read = read.reshape(-1)
    return Positions(_route(sharding, call.state[PAGES], pages, read), pages, read, here, refused)


def _positions_of_keys(
    sharding: Sharding, page_table: jax.Array, keys: jax.Array, here: jax.Array
) -> Positions:
    first, rest = words_of(keys)
    pages, read = (
        Paged(owners_of(first, rest, sharding.layout.devices), first, rest),
        here.reshape(-1),
    )
    route = _route(sharding, page_table, pages, read)
    return Positions(route, pages, read, here, jnp.zeros((), bool))


def _route(sharding: Sharding, page_table: jax.Array, pages: Paged, read: jax.Array) -> Route:
    layout, places = sharding.layout, page_table[pages.page]
    if layout.replicas == 1:
        place = places[:, 0]
    else:
        # Devices share the replicas of a page evenly.
        count = jnp.sum(places >= 0, axis=1, dtype=jnp.int32)
        turn = lax.axis_index(sharding.axes).astype(jnp.int32) % count
        place = jnp.take_along_axis(places, turn[:, None], axis=1)[:, 0]
    return Route(
        jnp.where(read, place // layout.pool, layout.devices),
        place % layout.pool * layout.page_size + pages.row,
        pages.rest,
    )


def _distinct(sharding: Sharding, positions: Positions, method: str) -> RowRequests:
    route, pages, read, here, refused = positions
    rows = distinct(route, sharding.layout.devices, method)
    # Positions that read nothing are a request as well, for no page.
    pages = pages._replace(page=jnp.where(read, pages.page, -1))
    pages = jax.tree.map(lambda part: part.at[rows.source].get(mode="fill", fill_value=-1), pages)
    return RowRequests(rows, pages, read, here, refused[None])


def _paged(layout: Layout, rows: jax.Array) -> Paged:
    """The pages of rows ``[S, cap]`` of a batch, position by position."""
    if layout.columns == 1:
        return paged(layout, rows.reshape(-1))
    shard = lax.iota(jnp.int32, rows.shape[0]) % layout.columns
    page = jnp.broadcast_to(shard[:, None], rows.shape)
    return Paged(page.reshape(-1), rows.reshape(-1).astype(jnp.int32))


def replicas_of(layout: Layout, page_table: jax.Array, pages: Paged, others: int) -> Route:
    """Routes to all replicas of rows, ``[rows * replicas * others]``, on ``others`` times as many devices."""
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
