"""`dynamic.insert`: gives the keys of a batch rows in all hash tables of a collection."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_tt._collection.collection import Collection, States
from jax_tt._collection.states import check_states, listed
from jax_tt._collection.values import values_of
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._ops.insert import insert_anywhere, insert_keys
from jax_tt._ops.inserting import Inserted, ToInsert, requests_of
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
    """Finds or inserts the keys of a batch in all hash tables of a collection; see `dynamic.insert`.

    The features of a table are one batch of it. Call it before `lookup_features`, outside of what is differentiated.

    Args:
        collection: the tables and features.
        state: arrays by table and name.
        batch: as in `lookup_features`; features of other tables are not looked at.
        scores: by feature, for tables with the policy ``"custom"``.
        epoch: for tables with the policies ``"epoch_lru"`` and ``"epoch_lfu"``.
        method, return_evicted: as in `dynamic.insert`.

    Returns:
        `Inserted` by hash table, and the state.

    >>> import jax, jax_tt, numpy as np
    >>> tables = {"item": jax_tt.hash_table(1024, 8), "ad": jax_tt.dense_table(50, 8)}
    >>> features = {"clicked": jax_tt.Feature("item"), "ad": jax_tt.Feature("ad")}
    >>> collection = jax_tt.Collection(tables, features)
    >>> batch = {"clicked": np.array([[-1, 2**60]]), "ad": np.array([[3]])}
    >>> state = collection.init(jax.random.key(0))
    >>> inserted, state = jax_tt.dynamic.insert(collection, state, batch)
    >>> int(inserted["item"].counts["inserted"])
    2
    """
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
        own = epoch if table in of_epochs else None
        asked.append(ToInsert(collection.for_batches[name], state[name], parts, own))
        ends[name] = list(itertools.accumulate(own.here.size for own in parts))
    results = insert_anywhere(asked, method, return_evicted)
    after, inserted = {name: dict(own) for name, own in state.items()}, {}
    for name, (done, own) in zip(hashed, results, strict=True):
        after[name], inserted[name] = own, done
        if done.found is not None:
            by_feature = jnp.split(done.found, ends[name][:-1])
            found = dict(zip(collection.features_of[name], by_feature, strict=True))
            inserted[name] = done._replace(found=found)
    return inserted, after
