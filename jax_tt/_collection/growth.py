"""`dynamic.grow_if_full`: growth of the hash tables of a collection between steps."""

from __future__ import annotations

from typing import Any

from jax_tt._collection.collection import Collection, States
from jax_tt._collection.states import check_states
from jax_tt._kinds.hashed.change import grow_if_full
from jax_tt._table.change import Change


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
    after = {name: dict(own) for name, own in state.items()}
    after |= {name: change.state for name, change in changes.items()}
    grown = {name: change for name, change in changes.items() if change.table is not hashed[name]}
    if not grown:
        return Change(collection, after, {})
    tables = {**collection.tables, **{name: change.table for name, change in grown.items()}}
    carry = {name: change.carry for name, change in grown.items()}
    return Change(Collection(tables, collection.features), after, carry)
