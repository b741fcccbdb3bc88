"""`dynamic.insert` and `dynamic.grow_if_full` of all hash tables of a collection."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from jax_tt._base.arguments import mismatch
from jax_tt._base.keywords import expect_names
from jax_tt._collection.collection import Collection, States
from jax_tt._collection.feature import check_features, values_of
from jax_tt._collection.requests import entered_keyed
from jax_tt._collection.stacks import Stack
from jax_tt._collection.states import UPDATES, bounds_by_table, check_states
from jax_tt._collection.statistics import STATISTICS
from jax_tt._directories.hash_directory import KEYS, WITHIN_EPOCHS
from jax_tt._ids.explicit import explicit_mesh
from jax_tt._ids.id_space import Slots
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.offsets import any_refused
from jax_tt._kinds.hashed.change import grow_if_full, grown_capacity
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._ops.insert import insert_anywhere, insert_keys, located
from jax_tt._ops.insert_in_call import (
    inserts,
    passed_through,
    to_insert,
    training,
    with_checked_gradients,
)
from jax_tt._ops.inserting import Inserted, InsertRequest, key_requests, treatment_of_keys
from jax_tt._table.change import Change
from jax_tt._table.check import check_state
from jax_tt._table.options import DEFAULT_BOUNDS, Lookup
from jax_tt._table.parts_of_arrays import attached, detached, is_rows, taken


@insert_keys.register(Collection)
def insert_collection_keys(
    collection: Collection,
    state: States,
    batch: Any,
    *,
    scores: Mapping[str, Any] | None = None,
    epoch: Any = None,
    method: str = "auto",
    bounds: str | Mapping[str, str] = DEFAULT_BOUNDS,
    return_evicted: bool = False,
) -> tuple[dict[str, Inserted], dict[str, dict[str, Any]]]:
    """`dynamic.insert` of all hash tables of a collection; the features of a table are one batch of it."""
    check_features(collection.features, batch)
    hashed, given, flags = collection.hashed, dict(scores or {}), []
    treatments = {
        name: treatment_of_keys(collection.tables[name], of, method)
        for name, of in bounds_by_table(bounds, collection.tables).items()
        if name in hashed
    }
    if isinstance(batch, KeyedBags):
        batch, refused = entered_keyed(collection, batch, list(treatments.values()))
        flags.append(refused)
    check_states("state", state, {_holder(collection, name): None for name in hashed})
    states = {name: collection.rows_of(state, name) for name in hashed}
    if get_abstract_mesh().manual_axes or explicit_mesh((states, batch)) is not None:
        states = taken(states)
    known = {f for name in hashed for f in collection.features_of[name]}
    expect_names("scores", "feature", given, sorted(known))
    of_epochs = [t for t in hashed.values() if t.policy in WITHIN_EPOCHS]
    if epoch is not None and not of_epochs:
        raise mismatch("epoch", f"{epoch!r} for a collection whose tables have no epochs", "None")
    asked = []
    for name, table in hashed.items():
        check_state(collection.tables[name], states[name])
        found = [
            key_requests(
                unsharded_hash_table(collection.for_features[feature]),
                batch[feature],
                given.get(feature),
                treatments[name],
            )
            for feature in collection.features_of[name]
        ]
        parts, refused = zip(*found, strict=True)
        flags += refused
        now = epoch if table in of_epochs else None
        asked.append(InsertRequest(collection.for_batches[name], states[name], parts, now))
    asked = [one._replace(refused=any_refused(flags)) for one in asked]
    results = insert_anywhere(asked, method, return_evicted)
    inserted = {
        name: _by_feature(collection.features_of[name], one, done)
        for name, one, (done, _) in zip(hashed, asked, results, strict=True)
    }
    arrays = {name: own for name, (_, own) in zip(hashed, results, strict=True)}
    return inserted, _with_keys(collection, state, arrays)


def _holder(collection: Collection, table: str) -> str:
    """What has the arrays of a table in a state: its stack, or itself."""
    return collection.stack_of[table].name if table in collection.stack_of else table


def _with_keys(collection: Collection, state: States, hashed: States) -> dict[str, dict[str, Any]]:
    """The state with the arrays of all hash tables."""
    after = {name: dict(arrays) for name, arrays in state.items()}
    for name in hashed.keys() - collection.stack_of.keys():
        after[name] = dict(hashed[name])
    for stack in collection.stacks.values():
        if stack.takes_keys:
            after[stack.name] = stack.joined(hashed)
    return after


def insert_in_collection_call(
    collection: Collection,
    state: States,
    batch: Any,
    lookups: Mapping[str, Lookup],
    refused: jax.Array | None,
) -> tuple[Any, dict[str, Any]]:
    """`insert_in_call` for the hash tables of a collection; ``lookups`` are the options by table.

    A batch that is ``refused`` inserts nothing.
    """
    values = values_of(collection.features, batch)
    constant = attached(
        *jax.lax.stop_gradient(detached({name: state[name] for name in collection.hashed}))
    )
    asked: dict[str, dict[str, InsertRequest]] = {}
    for name in collection.hashed:
        table, lookup, features = (
            collection.for_batches[name],
            lookups[name],
            collection.features_of[name],
        )
        if inserts(table, lookup, [values[feature] for feature in features]):
            parts = [(collection.for_features[feature], values[feature]) for feature in features]
            one = to_insert(table, constant[name], parts, lookup)
            asked.setdefault(lookup.method, {})[name] = one._replace(refused=refused)
    inserted: dict[str, Any] = {}
    for method, tables in asked.items():
        results = insert_anywhere(list(tables.values()), method, False)
        for (name, one), (done, arrays) in zip(tables.items(), results, strict=True):
            inserted[name] = arrays
            found = _by_feature(collection.features_of[name], one, done)
            values = located(values, {name: found}, current=True)
    after = dict(state)
    for members in _sharing_arrays(collection, state):
        tables = [collection.for_batches[name] for name in members]
        trained = training(tables, [lookups[name] for name in members])
        whole = _arrays_of(state[members[0]])
        # One call has inserted into all of these, so that they have the same arrays after it.
        changed = [_arrays_of(inserted[name]) for name in members if name in inserted]
        if changed:
            whole = passed_through(trained, _arrays_of(constant[members[0]]), whole, changed[0])
        else:
            whole = with_checked_gradients(trained, whole)
        for name in members:
            own = inserted.get(name, state[name])
            after[name] = {
                n: x.of(whole[n]) if is_rows(x) else whole.get(n, x) for n, x in own.items()
            }
    return (values if asked else batch), after


def _sharing_arrays(collection: Collection, state: States) -> list[list[str]]:
    """The hash tables by what has their arrays: those of a stack together, where their arrays are rows of it."""
    groups: dict[Any, list[str]] = {}
    for name in collection.hashed:
        rows = state[name][KEYS[0]]
        groups.setdefault(rows.key if is_rows(rows) else name, []).append(name)
    return list(groups.values())


def _arrays_of(own: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a table, or those of the stack that has its rows."""
    return {name: x.array for name, x in own.items() if is_rows(x)} or dict(own)


def _by_feature(features: Sequence[str], asked: InsertRequest, done: Inserted) -> Inserted:
    """The result with the slots of every feature."""
    parts: Sequence[Any] = [None] * len(features)
    if done.found is not None:
        ends = itertools.accumulate(part.here.size for part in asked.parts)
        parts = [Slots(part) for part in jnp.split(done.found.numbers, list(ends)[:-1])]
    return done._replace(found=dict(zip(features, parts, strict=True)))


@grow_if_full.register(Collection)
def grow_collection_if_full(
    collection: Collection, state: States, *, max_load: float = 0.75, method: str = "auto"
) -> Change:
    """`dynamic.grow_if_full` of all hash tables of a collection."""
    hashed = [name for name, table in collection.tables.items() if table.ids.takes_keys]
    return grow_tables_if_full(collection, state, hashed, max_load, method)


def grow_tables_if_full(
    collection: Collection, state: States, names: Sequence[str], max_load: float, method: str
) -> Change:
    """`dynamic.grow_if_full` of some hash tables of a collection."""
    check_states("state", state, {_holder(collection, name): None for name in names})
    after = {name: dict(arrays) for name, arrays in state.items()}
    grown: dict[str, Change] = {}
    for name in names:
        table: Any = collection.tables[name]
        stack, own = collection.stack_of.get(name), collection.rows_of(state, name)
        if stack is not None:
            if grown_capacity(table, taken({KEYS[2]: own[KEYS[2]]}), max_load) == own[KEYS[2]].size:
                continue
            _refuse_moments_of(stack, name)
        change = grow_if_full(table, taken(own), max_load=max_load, method=method)
        if stack is None:
            after[name] = change.state
        if change.table is not table:
            grown[name] = change
    if not grown:
        return Change(collection, after, {})
    carry = {name: change.carry for name, change in grown.items()}
    new = {name: change.table for name, change in grown.items()}
    larger = dataclasses.replace(collection, tables={**collection.tables, **new})
    if not collection.stacks:
        return Change(larger, after, carry)
    states = collection.rows_by_table(after) | {n: change.state for n, change in grown.items()}
    others = {name: own for name, own in after.items() if name in (UPDATES, STATISTICS)}
    return Change(larger, larger.from_tables(states, others.pop(UPDATES, {})) | others, carry)


def _refuse_moments_of(stack: Stack, table: str) -> None:
    """Raises for a stack that optax trains as one parameter, of which it may have moments."""
    if not stack.is_fused:
        names = ", ".join(stack.tables)
        got = f"a stack without an optimizer, of {names}, for the growth of {table!r}"
        expected = "arrays of its own, as optax may have moments of the rows"
        fix = "Describe the tables with an optimizer, or the collection with stack=False."
        raise mismatch("collection", got, expected, fix)
