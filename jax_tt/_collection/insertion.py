"""`dynamic.insert` and `dynamic.grow_if_full` of all hash tables of a collection."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import mismatch
from jax_tt._base.keywords import expect_names
from jax_tt._collection.collection import Collection, States
from jax_tt._collection.feature import check_features, values_of
from jax_tt._collection.requests import entered_keyed
from jax_tt._collection.states import bounds_by_table, check_states
from jax_tt._directories.hash_directory import WITHIN_EPOCHS
from jax_tt._ids.id_space import Slots
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.offsets import any_refused
from jax_tt._kinds.hashed.change import grow_if_full
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._ops.insert import insert_anywhere, insert_keys, located
from jax_tt._ops.insert_in_call import (
    inserts,
    passed_through,
    to_insert,
    with_checked_gradients,
)
from jax_tt._ops.inserting import Inserted, InsertRequest, key_requests, treatment_of_keys
from jax_tt._table.change import Change
from jax_tt._table.check import check_state
from jax_tt._table.options import DEFAULT_BOUNDS, Lookup


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
    check_states("state", state, hashed)
    known = {f for name in hashed for f in collection.features_of[name]}
    expect_names("scores", "feature", given, sorted(known))
    of_epochs = [t for t in hashed.values() if t.policy in WITHIN_EPOCHS]
    if epoch is not None and not of_epochs:
        raise mismatch("epoch", f"{epoch!r} for a collection whose tables have no epochs", "None")
    asked = []
    for name, table in hashed.items():
        check_state(collection.tables[name], state[name])
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
        asked.append(InsertRequest(collection.for_batches[name], state[name], parts, now))
    asked = [one._replace(refused=any_refused(flags)) for one in asked]
    results = insert_anywhere(asked, method, return_evicted)
    after, inserted = {name: dict(arrays) for name, arrays in state.items()}, {}
    for name, one, (done, arrays) in zip(hashed, asked, results, strict=True):
        after[name] = arrays
        inserted[name] = _by_feature(collection.features_of[name], one, done)
    return inserted, after


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
    asked: dict[str, dict[str, InsertRequest]] = {}
    after: dict[str, Any] = dict(state)
    for name in collection.hashed:
        table, lookup, features = (
            collection.for_batches[name],
            lookups[name],
            collection.features_of[name],
        )
        if inserts(table, lookup, [values[feature] for feature in features]):
            parts = [(collection.for_features[feature], values[feature]) for feature in features]
            one = to_insert(table, state[name], parts, lookup)
            asked.setdefault(lookup.method, {})[name] = one._replace(refused=refused)
        else:
            after[name] = with_checked_gradients(table, state[name], lookup)
    for method, tables in asked.items():
        results = insert_anywhere(list(tables.values()), method, False)
        for (name, one), (done, arrays) in zip(tables.items(), results, strict=True):
            after[name] = passed_through(one, state[name], arrays)
            found = _by_feature(collection.features_of[name], one, done)
            values = located(values, {name: found}, current=True)
    return (values if asked else batch), after


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
    hashed: dict[str, Any] = {n: t for n, t in collection.tables.items() if t.ids.takes_keys}
    check_states("state", state, hashed)
    changes = {
        name: grow_if_full(table, state[name], max_load=max_load, method=method)
        for name, table in hashed.items()
    }
    after = {name: dict(arrays) for name, arrays in state.items()}
    after |= {name: change.state for name, change in changes.items()}
    grown = {name: change for name, change in changes.items() if change.table is not hashed[name]}
    if not grown:
        return Change(collection, after, {})
    tables = {**collection.tables, **{name: change.table for name, change in grown.items()}}
    carry = {name: change.carry for name, change in grown.items()}
    return Change(dataclasses.replace(collection, tables=tables), after, carry)
