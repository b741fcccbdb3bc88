"""Insertion into sharded hash tables, on the devices that own the keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_tt._base import words
from jax_tt._directories.hash_directory import (
    CLOCK,
    COUNTERS,
    KEYS,
    SEED,
    TOTALS,
    WAITING,
    WITHIN_EPOCHS,
    Check,
    KeyDirectory,
    check_count,
)
from jax_tt._directories.hashing import words_of
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._jax.vma import of_all, places_of_all
from jax_tt._kinds.hashed.table import HashTable
from jax_tt._kinds.sharded.exchange import exchanged, other_rounds
from jax_tt._kinds.sharded.group import ShardedGroup, inside_shard_map
from jax_tt._kinds.sharded.local import AskedKeys, received_keys
from jax_tt._kinds.sharded.programs import Local
from jax_tt._kinds.sharded.requests import replicas_of, requests_of_keys
from jax_tt._kinds.sharded.route import Messages, Route, all_messages, distinct, message_rows
from jax_tt._kinds.sharded.sharding import PAGES
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._native import hash_backend
from jax_tt._ops.inserting import (
    Evicted,
    Inserted,
    InsertRequest,
    KeyRequests,
    epoch_of,
    insert_together,
    joined,
    no_room,
    with_clock_counted_on,
)
from jax_tt._table.options import Lookup


def insert_over_devices(
    asked: Sequence[InsertRequest], method: str, return_evicted: bool
) -> list[tuple[Inserted, dict[str, Any]]]:
    """`dynamic.insert` of several `ShardedTable`; tables over the same devices share one exchange."""
    groups: dict[ShardedGroup, list[int]] = {}
    for k, one in enumerate(asked):
        groups.setdefault(one.table.group, []).append(k)
    results: dict[int, tuple[Inserted, dict[str, Any]]] = {}
    for group, members in groups.items():
        of_group = _insert_in_group(group, [asked[k] for k in members], method, return_evicted)
        results.update(zip(members, of_group, strict=True))
    return [results[k] for k in range(len(asked))]


def _insert_in_group(
    group: ShardedGroup, asked: Sequence[InsertRequest], method: str, return_evicted: bool
) -> list[tuple[Inserted, dict[str, Any]]]:
    tables = [one.table for one in asked]
    given = [_inputs(one) for one in asked]

    local = Local(_of_device, (tuple(tables), method, return_evicted))
    if inside_shard_map():
        after = local(given)
    else:
        states = [
            {name: P(group.axes) if name in table.sharding.names else P() for name in one[0]}
            for table, one in zip(tables, given, strict=True)
        ]
        specs = [(state, P(group.mesh.axis_names), P()) for state in states]
        changed = [
            (
                {name: s for name, s in state.items() if name not in (SEED, PAGES)},
                P(),
                _evicted_of(table, lambda array: P()) if return_evicted else None,
            )
            for table, state in zip(tables, states, strict=True)
        ]

        def call(given: Any) -> Any:
            return group.on_devices(local, (specs,), changed)(given)

        after = over_explicit_axes(call, given, changed)
    results = []
    for one, (state, counts, evicted) in zip(asked, after, strict=True):
        if not inside_shard_map():  # without what fills the batch up to a multiple of the devices
            size = sum(part.here.size for part in one.parts)
            evicted = jax.tree.map(lambda array, size=size: array[:size], evicted)
        counts = dict(zip(COUNTERS, counts, strict=True))
        results.append((Inserted(None, None, counts, None, evicted), {**one.state, **state}))
    return results


def _inputs(one: InsertRequest) -> tuple[dict[str, Any], list[KeyRequests], Any]:
    names = {*one.table.sharding.names, CLOCK, SEED, TOTALS, PAGES}
    devices = one.table.parts

    def padded(array: jax.Array) -> jax.Array:
        count = array.shape[0]
        spare = max(-(-count // devices), 1) * devices - count
        return jnp.pad(array, [(0, spare), *[(0, 0)] * (array.ndim - 1)]) if spare else array

    parts = jax.lax.stop_gradient(jax.tree.map(padded, list(one.parts)))
    epoch = epoch_of(one.table.table, one.epoch)
    return {name: one.state[name] for name in names}, parts, epoch


# Arrays that change, counts, and `Evicted` if asked for.
_Done = tuple[dict[str, Any], jax.Array, Evicted | None]


class _Sent(NamedTuple):
    """What is sent of one table: a route, its messages, and values of every entry of the route, ``[n, ...]``."""

    route: Route
    messages: Messages
    values: list[jax.Array]


def _of_device(tables: tuple[Any, ...], method: str, return_evicted: bool, inputs: Any) -> Any:
    asked = [InsertRequest(table, *one) for table, one in zip(tables, inputs, strict=True)]
    return _local(asked, method, return_evicted)


def _local(asked: Sequence[InsertRequest], method: str, return_evicted: bool) -> list[_Done]:
    """Inserts on this device; returns the arrays that change, and the counts and evicted keys of all devices."""
    asked = with_clock_counted_on(asked, method)
    sharding = asked[0].table.sharding
    everywhere = sharding.everywhere
    devices = lax.axis_size(everywhere)
    lookup = Lookup(method=method)
    methods = [one.table.execution(lookup, one.state).method for one in asked]
    routes = [_route(*pair, devices) for pair in zip(asked, methods, strict=True)]
    sizes = [message_rows(route.row.shape[0], devices) for route, _ in routes]
    messages, bits = all_messages([route for route, _ in routes], sizes, devices, everywhere)
    sent = [
        _Sent(route, one, values) for (route, values), one in zip(routes, messages, strict=True)
    ]

    def insert(k: Any, carry: Any) -> Any:
        parts: list[jax.Array] = []
        for one in sent:
            parts += one.route.message(one.messages, k, devices, np.True_)
            number = one.messages.sent(k, devices)
            for values in one.values:
                part = values.at[number].get(mode="fill", fill_value=0)
                parts.append(part.reshape(devices, one.messages.size, *values.shape[1:]))
        received = iter(exchanged(parts, everywhere))
        return [
            _at_owner(one, done, received, method) for one, done in zip(asked, carry, strict=True)
        ]

    def mark(k: Any, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        parts = [
            part for one in sent for part in one.route.message(one.messages, k, devices, np.True_)
        ]
        received = iter(exchanged(parts, everywhere))
        return [
            _mark(*pair, received_keys(received), method)
            for pair in zip(asked, states, strict=True)
        ]

    # A round must not evict the keys of a later one.
    touched = [
        {name: one.state[name] for name in (KEYS[2], WAITING[2]) if name in one.state}
        for one in asked
    ]
    marked = other_rounds(mark, bits, touched)
    nothing = jnp.zeros(len(COUNTERS), jnp.int32)
    start = [
        (
            {name: x for name, x in one.state.items() if name not in (SEED, PAGES)} | touched,
            nothing,
            _none_evicted(one, devices) if return_evicted else None,
        )
        for one, touched in zip(asked, marked, strict=True)
    ]
    after = other_rounds(insert, bits, insert(0, start))
    results = []
    for one, (state, counts, evicted) in zip(asked, after, strict=True):
        counts = lax.psum(counts, sharding.axes)
        table = one.table.table
        if table.safe_check == "error":
            check_count(Check("error", no_room(table)), counts[-1])
        totals = words.added(one.state[TOTALS], counts.astype(jnp.uint32))
        if evicted is not None:
            evicted = _evicted_of_all(evicted, _requests_of_all(one, devices), sharding.axes)
        results.append(({**state, TOTALS: totals}, counts, evicted))
    return results


def _requests_of_all(one: InsertRequest, devices: int) -> int:
    return sum(part.here.size for part in one.parts) * devices


def _evicted_of(table: ShardedTable, value: Callable[[Any], Any]) -> Evicted:
    """`Evicted` with a value in place of every array; it is given the name of the array of the state."""
    arrays = {name: value(name) for name in table.table.table.spec.row_arrays}
    keys, scores, touched = map(value, KEYS)
    return Evicted(keys, scores, touched, arrays)


def _none_evicted(one: InsertRequest, devices: int) -> Evicted:
    """Room for all keys that this device may evict."""
    most = min(_requests_of_all(one, devices), one.table.sharding.shard.num_embeddings)

    def empty(name: str) -> jax.Array:
        like = one.state[name]
        shape = {KEYS[0]: (2,), KEYS[1]: (2,), KEYS[2]: ()}.get(name, like.shape[1:])
        return jnp.zeros((most, *shape), like.dtype)

    return _evicted_of(one.table, empty)


def _with_evicted(before: Evicted | None, new: Evicted | None) -> Evicted | None:
    """Writes the keys that a round has evicted behind those of the rounds before it."""
    if before is None or new is None:
        return None
    here = new.touched > 0
    places = jnp.sum(before.touched > 0) + jnp.cumsum(here) - 1
    at = jnp.where(here, places, before.touched.shape[0])
    return jax.tree.map(lambda old, rows: old.at[at].set(rows, mode="drop"), before, new)


def _evicted_of_all(evicted: Evicted, size: int, axes: tuple[str, ...]) -> Evicted:
    here = evicted.touched > 0
    places = jnp.where(here, places_of_all(here, axes), size)
    return jax.tree.map(lambda array: of_all(array, places, size, axes), evicted)


def _route(one: InsertRequest, method: str, devices: int) -> tuple[Route, list[jax.Array]]:
    """The route to all devices that hold the keys, and what goes with every key: its requests, and its score."""
    sharding = one.table.sharding
    layout = sharding.layout
    keys, here, given, _ = joined(one.parts)
    requests = requests_of_keys(sharding, one.state[PAGES], keys, here, method)
    places, size = requests.distinct.places, here.shape[0]
    at = jnp.where(here, places, size)
    values = [jnp.zeros(size, jnp.int32).at[at].add(1, mode="drop")]
    if one.table.table.policy == "custom":
        values.append(lax.bitcast_convert_type(_largest(given, at, size), jnp.int32))
    copies = devices // layout.devices
    if copies == 1:
        return requests.distinct.route, values
    to_all = distinct(
        replicas_of(layout, one.state[PAGES], requests.pages, copies), devices, method
    )
    source = to_all.source // copies
    return to_all.route, [x.at[source].get(mode="fill", fill_value=0) for x in values]


def _largest(scores: jax.Array, at: jax.Array, size: int) -> jax.Array:
    """The largest score of every place ``at``, of scores uint32 ``[n, 2]``, high and low word."""
    none = jnp.zeros(size, jnp.uint32)
    high = none.at[at].max(scores[:, 0], mode="drop")
    leading = high.at[at].get(mode="fill", fill_value=0) == scores[:, 0]
    low = none.at[jnp.where(leading, at, size)].max(scores[:, 1], mode="drop")
    return jnp.stack([high, low], axis=1)


def _mark(
    one: InsertRequest, touched: dict[str, Any], keys: AskedKeys, method: str
) -> dict[str, Any]:
    """Marks the slots of the received keys with a last batch that is above all batches.

    The number of this batch would stand for keys that it has already inserted.
    """
    method = one.table.sharding.shard.execution(Lookup(method=method), one.state).method
    after, here = {}, keys.here
    for names in (KEYS, WAITING):
        if names[2] not in touched:
            continue
        # XLA would copy last batches that the loop does not carry.
        directory = KeyDirectory(one.state[names[0]], one.state[names[1]], touched[names[2]])
        slots = hash_backend.find(directory, keys.keys, here, method)
        here = here & (slots < 0)
        at = jnp.where(slots < 0, directory.capacity, slots)
        before = touched[names[2]]
        last = before.reshape(-1).at[at].set(np.iinfo(np.int32).max, mode="drop")
        after[names[2]] = last.reshape(before.shape)
    return after


def _at_owner(one: InsertRequest, done: _Done, parts: Any, method: str) -> _Done:
    """Inserts the received keys; returns the updated arrays, counts and evicted keys."""
    state, counts, evicted = done
    local: HashTable = one.table.sharding.shard
    keys = received_keys(parts)
    requests = jnp.where(keys.here, next(parts).reshape(-1), 0)
    given = jnp.zeros_like(keys.keys)
    if local.policy == "custom":
        given = lax.bitcast_convert_type(next(parts).reshape(-1, 2), jnp.uint32)
    arrived = KeyRequests(keys.keys, keys.here, given, requests)
    # All rounds are one batch, with one number.
    before = {**one.state, **state, CLOCK: one.state[CLOCK]}
    if local.counts_requests:
        arrived = _distinct_keys(arrived, local.execution(Lookup(method=method), before).method)
    # An insertion that raised on one device alone would leave the others waiting.
    quiet = dataclasses.replace(
        local, safe_check="warn" if local.safe_check == "warn" else "ignore"
    )
    epoch = one.epoch if local.policy in WITHIN_EPOCHS else None
    asked = InsertRequest(quiet, before, [arrived], epoch)
    ((inserted, after),) = insert_together([asked], method, evicted is not None)
    counts = counts + jnp.stack([inserted.counts[name] for name in COUNTERS])
    evicted = _with_evicted(evicted, inserted.evicted)
    return {name: after[name] for name in state}, counts, evicted


def _distinct_keys(arrived: KeyRequests, method: str) -> KeyRequests:
    """The different keys among the received ones, each with its requests of all devices."""
    keys, here, given, counts = arrived
    size, (first, rest) = here.shape[0], words_of(keys)
    keys_of_all = distinct(Route((~here).astype(jnp.int32), first, rest), 1, method)
    at = jnp.where(here, keys_of_all.places, size)
    return KeyRequests(
        keys.at[keys_of_all.source].get(mode="fill", fill_value=0),
        keys_of_all.route.device == 0,
        _largest(given, at, size),
        jnp.zeros(size, jnp.int32).at[at].add(counts, mode="drop"),
    )
