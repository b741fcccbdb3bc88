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
    """Doubles the capacity of hash tables whose load exceeds a limit, up to their ``max_capacity``.

    Call it between steps, outside of ``jit``; see `grow_if_full`.

    Args:
        collection: the tables and features.
        state: arrays by table and name.
        max_load: the share of occupied slots, from 0 to 1, above which a table grows.
        method: as in `Lookup`.

    Returns:
        The collection and the state, as they were if no table has grown.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(64, 8, max_capacity=256)
    >>> collection = jax_tt.Collection({"item": table}, {"seen": jax_tt.Feature("item")})
    >>> state = collection.init(jax.random.key(0))
    >>> _, state = jax_tt.dynamic.insert(collection, state, {"seen": np.arange(40)[:, None]})
    >>> collection, state = jax_tt.dynamic.grow_if_full(collection, state, max_load=0.5)
    >>> collection.tables["item"].num_embeddings, state["item"]["embedding"].shape
    (128, (128, 8))
    """
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
