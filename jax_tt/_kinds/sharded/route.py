"""Which rows go to which devices, in rounds of messages of a fixed size.

The rows for a device are ordered by a hash. A round takes the rows whose hashes have the same leading bits, as many
bits as it takes for every message to hold its rows: as a rule none, and then there is one round. All requests for a row
are in the same round on all devices, so that the gradients of a row are complete in it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.ffi import available
from jax_tt._base.words import mix
from jax_tt._jax.backend import by_platform
from jax_tt._native.call import native_call


class Route(NamedTuple):
    """Different rows, ordered by device and hash.

    Attributes:
        device: ``[n]``, the number of devices for none.
        row: of that device, ``[n]``; of keys, the first word.
        rest: the second words of keys, ``[n]``; None for rows.
    """

    device: jax.Array
    row: jax.Array
    rest: jax.Array | None = None

    def message(self, messages: Messages, k: Any, devices: int, allowed: Any) -> list[jax.Array]:
        """What is sent of this route in round ``k``, int32 ``[devices, size]``: rows, and -1 where there are none.

        Of keys, both words, and ``[devices, 1]``, the number of keys for a device. Nothing that is not allowed is sent.
        """
        number = messages.sent(k, devices)
        shape = devices, messages.size
        row = self.row.at[number].get(mode="fill", fill_value=-1)
        if self.rest is None:
            return [jnp.where(allowed, row, -1).reshape(shape)]
        rest = self.rest.at[number].get(mode="fill", fill_value=0)
        here = (number < self.row.shape[0]).reshape(shape) & allowed
        count = jnp.sum(here, axis=1, keepdims=True, dtype=jnp.int32)
        return [row.reshape(shape), rest.reshape(shape), count]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Messages:
    """Where the rows of a route travel.

    Attributes:
        turn: the round of every row, uint32 ``[n]``.
        place: among the messages of its round ``[devices * size]``; past the end for none.
        size: static; rows of a message to one device.
    """

    turn: jax.Array
    place: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def sent(self, k: Any, devices: int) -> jax.Array:
        """The rows of the route that are sent in round ``k``, ``[devices * size]``; past the end for none."""
        total, (count,) = devices * self.size, self.place.shape
        place = jnp.where(self.turn == jnp.asarray(k, jnp.uint32), self.place, total)
        none = jnp.full(total, count, jnp.int32)
        return none.at[place].set(lax.iota(jnp.int32, count), mode="drop", unique_indices=True)

    def with_round(
        self, held: jax.Array, more: jax.Array, kept: jax.Array, k: Any, devices: int
    ) -> jax.Array:
        """The rows that are ``held`` where they are ``kept``, with those that have arrived in round ``k``."""
        at = kept.at[self.sent(k, devices)].get(mode="fill", fill_value=held.shape[0])
        return held.at[at].set(more, mode="drop")


class DistinctRows(NamedTuple):
    """The route to the different rows among n requests.

    ``source`` is a request for each of them, ``[n]``, n for none; ``places[n]`` say where the row of a request is.
    """

    route: Route
    source: jax.Array
    places: jax.Array


def distinct(requests: Route, devices: int, method: str) -> DistinctRows:
    """The different rows among requests in any order, by ascending device and hash.

    The number of ``devices`` stands for no device among the requests. ``method`` is as in `Lookup`.
    """
    return sorted_on_cpu(method, _native_distinct, _distinct, devices, requests)


def sorted_on_cpu(
    method: str, native: Callable[..., Any], plain: Callable[..., Any], static: Any, *args: Any
) -> Any:
    """``native(static, *args)`` on the CPU if ``method`` allows it, else ``plain``, which XLA sorts on the device."""
    native, plain = functools.partial(native, static), functools.partial(plain, static)
    if method not in ("auto", "native") or not available("cpu"):
        return plain(*args)
    return by_platform({"cpu": native}, plain, *args)


def _native_distinct(devices: int, requests: Route) -> DistinctRows:
    operands = {"device": requests.device, "row": requests.row}
    kind = jax.ShapeDtypeStruct(requests.row.shape, jnp.int32)
    results: Any = dict.fromkeys(("found_device", "found_row", "source", "places"), kind)
    attributes = {"devices": np.int64(devices)}
    found = native_call("cpu", "route_distinct", operands, results, None, attributes)
    device, row, *rest = found.values()
    result = DistinctRows(Route(device, row), *rest)
    if requests.rest is None:
        return result
    # The op knows nothing of second words. Different keys seldom have the same first one.
    second = requests.rest.at[result.source].get(mode="fill", fill_value=0)
    result = result._replace(route=result.route._replace(rest=second))
    alike = jnp.all(second[result.places] == requests.rest)
    return lax.cond(alike, lambda: result, lambda: _distinct(devices, requests))


def _distinct(devices: int, requests: Route) -> DistinctRows:
    (count,) = requests.row.shape
    keys = [requests.device, mix(requests.row.astype(jnp.uint32))]
    keys += [] if requests.rest is None else [requests.rest]
    *keys, order = lax.sort((*keys, lax.iota(jnp.int32, count)), num_keys=len(keys))
    first = _changes(*keys)
    rank = jnp.cumsum(first, dtype=jnp.int32) - 1
    places = jnp.zeros_like(order).at[order].set(rank, unique_indices=True)
    source = jnp.full_like(order, count).at[jnp.where(first, rank, count)].set(order, mode="drop")
    device = requests.device.at[source].get(mode="fill", fill_value=devices)
    row = requests.row.at[source].get(mode="fill", fill_value=0)
    rest = requests.rest
    if rest is not None:
        rest = rest.at[source].get(mode="fill", fill_value=0)
    return DistinctRows(Route(device, row, rest), source, places)


def message_rows(count: int, devices: int) -> int:
    """Rows of a message: four standard deviations above the mean, if ``count`` rows are spread evenly.

    At least eight: where messages have few rows, there are many messages, one of which would often be too small. And
    keys with the same hash of 32 bits cannot travel in different rounds; a batch does not have nine of them.
    """
    mean = count / devices
    return max(1, min(count, max(8, math.ceil(mean + 4 * math.sqrt(mean)))))


def leading_bits(route: Route, size: int, devices: int) -> jax.Array:
    """The number of leading bits of hashes by which rounds are told apart, so that messages of ``size`` suffice."""
    (count,) = route.row.shape
    if count <= size:
        return jnp.zeros((), jnp.int32)
    hashes = mix(route.row.astype(jnp.uint32))
    together = (route.device[:-size] == route.device[size:]) & (route.device[size:] < devices)
    common = lax.clz(hashes[:-size] ^ hashes[size:]).astype(jnp.int32)
    return jnp.max(jnp.where(together, common + 1, 0))


def messages_of(route: Route, bits: jax.Array | None, size: int, devices: int) -> Messages:
    """The round of every row and its place in the messages, which hold ``size`` rows for each device."""
    (count,) = route.row.shape
    turn = round_of(route.row, bits)
    numbers = lax.iota(jnp.int32, count)

    def of_one_round() -> jax.Array:
        every = jnp.arange(devices + 1, dtype=jnp.int32)
        return jnp.searchsorted(route.device, every).astype(jnp.int32)[route.device]

    def of_several() -> jax.Array:
        return lax.cummax(jnp.where(_changes(route.device, turn), numbers, 0))

    # A scan of all rows takes many passes on a CPU.
    begin = of_one_round() if bits is None else lax.cond(bits > 0, of_several, of_one_round)
    rank = numbers - begin
    sent = (route.device < devices) & (rank < size)
    return Messages(turn, jnp.where(sent, route.device * size + rank, devices * size), size)


def all_messages(
    routes: Sequence[Route],
    sizes: Sequence[int],
    devices: int,
    axes: Any,
    least: jax.Array | None = None,
) -> tuple[list[Messages], jax.Array]:
    """The messages for routes of several tables, and the number of leading bits that tell their rounds apart.

    ``sizes`` are the rows of a message of each route. The devices along ``axes`` agree on the number of bits, which is
    at least ``least``.
    """
    needed = [leading_bits(*pair, devices) for pair in zip(routes, sizes, strict=True)]
    needed += [] if least is None else [least]
    bits = lax.pmax(jnp.max(jnp.stack(needed)), axes)
    pairs = zip(routes, sizes, strict=True)
    return [messages_of(route, bits, size, devices) for route, size in pairs], bits


def round_of(rows: jax.Array, bits: jax.Array | None) -> jax.Array:
    """The round of rows of a device, uint32, if this number of leading bits tells rounds apart; None for one round."""
    if bits is None:
        return jnp.zeros(rows.shape, jnp.uint32)
    shift = jnp.clip(32 - bits, 0, 31).astype(jnp.uint32)
    return jnp.where(bits > 0, mix(rows.astype(jnp.uint32)) >> shift, np.uint32(0))


def kept_places(messages: Messages, bits: jax.Array, devices: int) -> jax.Array:
    """Where rows are kept in an array as large as the messages of a round.

    Rows of the first round, as a rule all of them, stay where they arrive; others take places that are free.
    """
    total = devices * messages.size

    def with_others() -> jax.Array:
        turn, place = messages.turn, messages.place
        first, last = (turn == 0) & (place < total), (turn > 0) & (place < total)
        free = jnp.ones(total, bool).at[jnp.where(first, place, total)].set(False, mode="drop")
        order = jnp.cumsum(free, dtype=jnp.int32) - 1
        places = jnp.zeros(total, jnp.int32)
        places = places.at[jnp.where(free, order, total)].set(
            lax.iota(jnp.int32, total), mode="drop"
        )
        rank = jnp.cumsum(last, dtype=jnp.int32) - 1
        return jnp.where(last, places[jnp.maximum(rank, 0)], place)

    return lax.cond(bits > 0, with_others, lambda: messages.place)


def _changes(*keys: jax.Array) -> jax.Array:
    """Where sorted keys differ from the ones before them."""
    changes = [key[1:] != key[:-1] for key in keys]
    return jnp.concatenate([jnp.ones(1, bool), functools.reduce(jnp.logical_or, changes)])
