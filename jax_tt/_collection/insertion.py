"""`dynamic.insert` and `dynamic.grow_if_full` of all hash tables of a collection."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_tt._collection.collection import Collection, States
from jax_tt._collection.feature import values_of
from jax_tt._collection.states import check_states, listed
from jax_tt._kinds.hashed.change import grow_if_full
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._ops.insert import insert_anywhere, insert_keys
from jax_tt._ops.inserting import Inserted, ToInsert, requests_of
from jax_tt._table.change import Change
from jax_tt._table.check import check_state


@insert_keys.register(Collection)
def insert_collection_keys(
    collection: Collection,
    state: States,
    batch: Any,
    *,
    scores: Mapping[str, Any] | None = None,
    epoch: Any = None,
    method: str = "auto",
    return_evicted: bool = False,
) -> tuple[dict[str, Inserted], dict[str, dict[str, Any]]]:
    """`dynamic.insert` of all hash tables of a collection; the features of a table are one batch of it."""
    values, given = values_of(collection.features, batch), dict(scores or {})
    hashed = {
        name: unsharded_hash_table(t)
        for name, t in collection.for_batches.items()
        if t.ids.takes_keys
    }
    check_states("state", state, hashed)
    known = {f for name in hashed for f in collection.features_of[name]}
    for feature in given:
        if feature not in known:
            raise ValueError(
                f"scores: got the feature {feature!r}; expected some of {listed(sorted(known))}."
            )
    of_epochs = [t for t in hashed.values() if t.policy.startswith("epoch_")]
    if epoch is not None and not of_epochs:
        raise ValueError(
            f"epoch: got {epoch!r} for a collection whose tables have no epochs; expected None."
        )
    asked, ends = [], {}
    for name, table in hashed.items():
        check_state(collection.tables[name], state[name])
        parts = [
            requests_of(
                unsharded_hash_table(collection.for_features[feature]),
                values[feature],
                given.get(feature),
            )
            for feature in collection.features_of[name]
        ]
        now = epoch if table in of_epochs else None
        asked.append(ToInsert(collection.for_batches[name], state[name], parts, now))
        ends[name] = list(itertools.accumulate(part.here.size for part in parts))
    results = insert_anywhere(asked, method, return_evicted)
    after, inserted = {name: dict(arrays) for name, arrays in state.items()}, {}
    for name, (done, arrays) in zip(hashed, results, strict=True):
        after[name], inserted[name] = arrays, done
        if done.found is not None:
            by_feature = jnp.split(done.found, ends[name][:-1])
            found = dict(zip(collection.features_of[name], by_feature, strict=True))
            inserted[name] = done._replace(found=found)
    return inserted, after


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
    return Change(Collection(tables, collection.features), after, carry)
