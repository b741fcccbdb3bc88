"""Whether the rows of a bag travel to the device of the bag, or sums of the rows that each device has."""

from __future__ import annotations

import math

import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.placement import Layout
from jax_tt._kinds.sharded.route import message_rows
from jax_tt._kinds.sharded.sharding import Sharding, sharding_of
from jax_tt._kinds.sharded.spread import bags_of
from jax_tt._table.groups import Call

# Messages for sums have room for this many times an even spread: room for ids costs less than another attempt.
_ROOM = 2


def sums_travel(call: Call) -> bool:
    """Whether sums travel for a call, in columns, with the batch of one device."""
    pooled = sharding_of(call).exchange.pooled
    if not can_travel_as_sums(call) or pooled == "rows":
        return False
    return pooled == "sums" or bytes_of_sums(call) < bytes_of_rows(call)


def can_travel_as_sums(call: Call) -> bool:
    """Whether a device can step its rows by the gradients of sums: it has the only replicas, and finds no keys."""
    sharding = sharding_of(call)
    alone = sharding.layout.replicas == 1 and not sharding.others
    return alone and bags_of(call) > 0 and not sharding.ids.takes_keys


def bytes_of_rows(call: Call) -> int:
    """Bytes of the messages of a device, if rows travel."""
    sharding = sharding_of(call)
    rows = rows_of_expected_message(sharding, _positions(call))
    return sharding.layout.devices * rows * (4 + _width(call) * _itemsize(call, True))


def bytes_of_sums(call: Call) -> int:
    """Bytes of the messages of a device, if sums travel."""
    bags = bags_of(call)
    weights = call.batch.weights
    # Weights travel with their ids, and their gradients back.
    ways = 2 if call.use.lookup.wanted.weights else 1
    of_id = 4 + (0 if weights is None else ways * weights.dtype.itemsize)
    ids = message_of(call) * of_id
    of_bag = 4 + _width(call) * _itemsize(call, False)
    return sharding_of(call).layout.devices * (ids + bags * of_bag)


def rows_of_expected_message(sharding: Sharding, count: int) -> int:
    """Rows in a message to one device, of ``count`` ids of a device, if rows travel."""
    exchange = sharding.exchange
    expected = math.ceil(count * exchange.expected_unique * exchange.expected_skew)
    return min(count, message_rows(expected, sharding.layout.devices))


def rows_of_message(layout: Layout, count: int, skew: float = 1) -> int:
    """Ids in a message to one device, of ``count`` ids of a device, if sums travel."""
    # The share of the device with most pages.
    share = layout.pool / layout.num_pages
    expected = math.ceil(count * min(1, max(_ROOM, skew) * share))
    return max(1, min(count, math.ceil(expected + 4 * math.sqrt(expected))))


def message_of(call: Call) -> int:
    """`rows_of_message` for a call."""
    sharding = sharding_of(call)
    return rows_of_message(sharding.layout, _positions(call), sharding.exchange.expected_skew)


def _positions(call: Call) -> int:
    return call.batch.num_segments * call.batch.capacity


def _width(call: Call) -> int:
    return sharding_of(call).rows.features


def _itemsize(call: Call, rows: bool) -> int:
    """Bytes of an element there, and of its gradient back if there is one."""
    sharding = sharding_of(call)
    storage = sharding.rows.spec.storage(call.state)
    accum = accumulator(storage)
    exchange = sharding.exchange
    there = exchange.type_of_rows(storage, accum) if rows else exchange.type_of_sums(accum)
    wanted = call.use.lookup.wanted
    returned = wanted.names or (wanted.weights and not rows)
    back = exchange.type_of_sums(accum) if returned else None
    return jnp.dtype(there).itemsize + (0 if back is None else jnp.dtype(back).itemsize)
