"""Bags whose ids travel to the owners of their rows, and of which sums of rows come back.

Each device sums the rows of a bag that it has: some of them, or some columns of all of them. A message to a device has
the ids of all bags that it has rows of, bag after bag, so that the messages that a device gets are a batch with a
segment for each sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.batch import Batch, bag_index, present
from jax_tt._kinds.sharded.exchange import exchanged
from jax_tt._kinds.sharded.requests import RowRequests, positions_of
from jax_tt._kinds.sharded.route import Route, sorted_on_cpu
from jax_tt._kinds.sharded.sharding import PAGES, sharding_of
from jax_tt._native.call import native_call
from jax_tt._table.groups import Call


class Places(NamedTuple):
    """The positions of a batch by the device of their rows.

    Attributes:
        rows: int32 ``[devices, size]``, in the order of the bags; 0 where there are no more.
        source: the positions that read the rows; the number of positions where there are no more.
        offsets: int32 ``[devices, bags + 1]``, where the bags begin and end.
        most: ``[1]``, the most positions for one device; beyond ``size``, some of them are left out.
    """

    rows: jax.Array
    source: jax.Array
    offsets: jax.Array
    most: jax.Array


class Spread(NamedTuple):
    """What one device sends of its part of a batch.

    Attributes:
        places: where the positions that read a row are sent.
        weights: ``[devices, size]``, or None.
        refused: whether an id must not be in the batch, ``[1]``.
        spoiled: ``[bags]``, whether a bag has such an id; None if ids cannot be refused.
    """

    places: Places
    weights: jax.Array | None
    refused: jax.Array
    spoiled: jax.Array | None

    def only_if(self, allowed: jax.Array) -> Spread:
        """These bags, or empty ones."""
        offsets = jnp.where(allowed, self.places.offsets, jnp.zeros_like(self.places.offsets))
        return self._replace(places=self.places._replace(offsets=offsets))

    def message(self) -> list[jax.Array]:
        """Rows, ends of the bags and weights for every device."""
        weights = [] if self.weights is None else [self.weights]
        return [self.places.rows, self.places.offsets[:, 1:], *weights]

    def largest(self, g: jax.Array) -> jax.Array:
        """A bound of the absolute gradients of rows, by ``g`` of `sent_gradients`; not finite if one is not."""
        offsets = self.places.offsets
        count = offsets[:, 1:] - offsets[:, :-1]
        used = jnp.any(count > 0, axis=0, keepdims=True) if g.shape[0] == 1 else count > 0
        most = jnp.max(jnp.where(used, jnp.max(jnp.abs(g), axis=2), 0), initial=0)
        if self.weights is not None:
            most = most * jnp.maximum(1, jnp.max(jnp.abs(self.weights), initial=0)).astype(g.dtype)
        return most * jnp.sum(count).astype(g.dtype)


def spread_of(call: Call, size: int) -> Spread:
    """Sorts the positions of this device's part of a batch by device, in messages of ``size`` rows."""
    layout, batch, lookup = sharding_of(call).layout, call.batch, call.use.lookup
    positions = positions_of(call)
    # The column shards of a bag are on different devices, to each of which it is one bag.
    segment = lax.iota(jnp.int32, batch.num_segments)[:, None] // layout.columns
    bag = (batch.num_bags * segment + bag_index(batch)).reshape(-1)
    bags = bags_of(call)
    places = bag_places(positions.route, bag, (layout.devices, size, bags), lookup.method)
    weights = batch.weights
    if weights is not None:
        weights = weights.reshape(-1).at[places.source].get(mode="fill", fill_value=0)
    spoiled = None
    if lookup.bounds == "error":
        not_read = positions.here.reshape(-1) & ~positions.read
        spoiled = jnp.zeros(bags, bool).at[bag].max(not_read, mode="drop")
    return Spread(places, weights, positions.refused[None], spoiled)


def bag_places(route: Route, bag: jax.Array, sizes: tuple[int, int, int], method: str) -> Places:
    """Sorts positions by the device that ``route`` names; the number of devices stands for none.

    ``bag`` is the bag of every position, ascending among positions that have a device, and ``sizes`` are the numbers of
    devices, of rows in a message, and of bags.
    """
    return sorted_on_cpu(method, _native_places, _places, sizes, route, bag)


def _native_places(sizes: tuple[int, int, int], route: Route, bag: jax.Array) -> Places:
    devices, size, bags = sizes
    shapes = (devices, size), (devices, size), (devices, bags + 1), (1,)
    types = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    results = dict(zip(Places._fields, types, strict=True))
    operands = {"device": route.device, "row": route.row, "bag": bag}
    names = "devices", "size", "bags"
    attributes = {name: np.int64(size) for name, size in zip(names, sizes, strict=True)}
    return Places(**native_call("cpu", "route_bags", operands, results, None, attributes))


def _places(sizes: tuple[int, int, int], route: Route, bag: jax.Array) -> Places:
    devices, size, bags = sizes
    (count,) = route.row.shape
    numbers = lax.iota(jnp.int32, count)
    device, order = lax.sort((route.device, numbers), num_keys=1, is_stable=True)
    begin = jnp.searchsorted(device, jnp.arange(devices + 1, dtype=jnp.int32)).astype(jnp.int32)
    rank = numbers - begin[device]
    at = jnp.where((device < devices) & (rank < size), device * size + rank, devices * size)
    source = jnp.full(devices * size, count, jnp.int32).at[at].set(order, mode="drop")
    rows = route.row.at[source].get(mode="fill", fill_value=0)
    # Positions for no device are beyond the last one, which drops them.
    counts = jnp.zeros((devices, bags + 1), jnp.int32)
    counts = counts.at[route.device, bag + 1].add(1, mode="drop")
    offsets = jnp.minimum(jnp.cumsum(counts, axis=1, dtype=jnp.int32), size)
    most = jnp.max(begin[1:] - begin[:-1], keepdims=True)
    shape = devices, size
    return Places(rows.reshape(shape), source.reshape(shape), offsets, most)


def received_bags(call: Call, parts: Iterator[jax.Array], allowed: Any) -> Batch:
    """Reads the bags of each device, a segment, from messages of `Spread.message`; empty ones unless ``allowed``."""
    ids, ends = next(parts), next(parts)
    weights = None if call.batch.weights is None else next(parts)
    offsets = jnp.pad(ends, [(0, 0), (1, 0)])
    return Batch(ids, jnp.where(allowed, offsets, jnp.zeros_like(offsets)), weights)


def whole_sums(call: Call, spread: Spread, parts: jax.Array) -> jax.Array:
    """Adds sums of the rows of each device, ``[devices, bags, D]``, or of all, ``[1, bags, D]``, to ``[S, nb, D]``."""
    columns, width = sharding_of(call).layout.columns, parts.shape[-1]
    accum = accumulator(sharding_of(call).rows.spec.storage(call.state))
    if columns == 1:
        sums = jnp.sum(parts.astype(accum), axis=0)[None]
    else:
        sums = parts[_devices_of_columns(call)].astype(accum)
    if spread.spoiled is not None:
        sums = jnp.where(spread.spoiled[None, :, None], jnp.nan, sums)
    segments, bags = call.batch.num_segments // columns, call.batch.num_bags
    sums = sums.reshape(columns, segments, bags, width).transpose(1, 0, 2, 3)
    return sums.reshape(segments * columns, bags, width)


def sent_gradients(call: Call, g: jax.Array) -> jax.Array:
    """Splits the gradients ``[S, nb, D]`` of sums for devices: ``[1, bags, D]`` for all of them, or one for each."""
    columns, width = sharding_of(call).layout.columns, g.shape[-1]
    segments, bags = call.batch.num_segments // columns, call.batch.num_bags
    parts = g.reshape(segments, columns, bags, width).transpose(1, 0, 2, 3)
    parts = parts.reshape(columns, segments * bags, width)
    if columns == 1:
        return parts
    nothing = jnp.zeros((sharding_of(call).layout.devices, *parts.shape[1:]), parts.dtype)
    return nothing.at[_devices_of_columns(call)].set(parts)


def returned_weights(
    calls: Sequence[Call],
    asks: Sequence[RowRequests | Spread],
    gradients: Sequence[jax.Array | None],
) -> dict[int, jax.Array]:
    """Sends the gradients of weights back from the owners of rows, for bags whose sums travelled.

    ``gradients`` of weights that arrived here are ``[devices, size]`` or None. Returns ``row . g`` of every position,
    ``[S, cap]``, by the number of the call.
    """
    spreads: dict[int, Spread] = {}
    sent = []
    for k, (call, ask, g) in enumerate(zip(calls, asks, gradients, strict=True)):
        if isinstance(ask, Spread) and g is not None:
            spreads[k] = ask
            sent.append(g.astype(call.batch.weights.dtype))
    back = exchanged(sent, sharding_of(calls[0]).axes) if sent else []
    return {
        k: _at_positions(calls[k], spread, part)
        for (k, spread), part in zip(spreads.items(), back, strict=True)
    }


def _at_positions(call: Call, spread: Spread, gradients: jax.Array) -> jax.Array:
    """The gradients where the ids were; 0 for ids that have no owner, since they are not read."""
    nothing = jnp.zeros(call.batch.ids.shape[:2], gradients.dtype)
    if call.use.lookup.bounds == "error":
        # Ids that must not be in the batch have no owner, and rows of NaN.
        nothing = jnp.where(present(call.batch), jnp.nan, nothing)
    at = spread.places.source
    return nothing.reshape(-1).at[at].set(gradients, mode="drop").reshape(nothing.shape)


def bags_of(call: Call) -> int:
    """The number of bags of a device, each of which counts once for all of its column shards."""
    return call.batch.num_segments * call.batch.num_bags // sharding_of(call).layout.columns


def _devices_of_columns(call: Call) -> jax.Array:
    return call.state[PAGES][:, 0] // sharding_of(call).layout.pool
