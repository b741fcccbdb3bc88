"""`dynamic.insert`: gives the keys of a batch a row, before the batch is looked up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jax_tt._kinds.hashed.table import HashTable, unsharded_hash_table
from jax_tt._ops.insert_sharded import insert_over_devices
from jax_tt._ops.inserting import Inserted, ToInsert, insert_together, requests_of
from jax_tt._table.check import check_state
from jax_tt._table.types import State


@functools.singledispatch
def insert_keys(
    table: HashTable,
    state: State,
    ids: Any,
    *,
    scores: Any = None,
    epoch: Any = None,
    method: str = "auto",
    return_evicted: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Finds or inserts the keys of a batch, which counts as one request for each of its ids.

    Call it before the lookup of the batch, outside of what is differentiated; under ``jit`` with a donated state it
    changes the state in place. The result does not depend on the order of the ids.

    Args:
        table: the `HashTable`, or a `ShardedTable` of one; or a `Collection`, whose features of one table are one batch
            of it.
        state: its arrays by name; those of a collection by table and name.
        ids: keys of any shape, or `Bags` of them, of which padding and unused positions do not count. For a collection
            its batch, as in `lookup_features`; features of other tables are not looked at.
        scores: with the policy ``"custom"``, and only then, one integer from 0 to 2**64 - 1 per id; the largest one
            of a key is its score. For a collection a dict by feature.
        epoch: with the policies ``"epoch_lru"`` and ``"epoch_lfu"``, and only then, the present epoch, an integer
            scalar from 0 to 2**31 - 1.
        method: as in `tt.embed_bag`.
        return_evicted: whether to return the rows that were evicted and their optimizer state, which costs reading
            them.

    Returns:
        `Inserted`, for a collection by hash table, and the state.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(1024, 8, optimizer=jax_tt.optimizers.Adagrad(0.1))
    >>> state = table.init(jax.random.key(0))
    >>> inserted, state = jax_tt.dynamic.insert(table, state, np.array([7, 7, -1]))
    >>> {name: int(count) for name, count in inserted.counts.items() if count}
    {'requests': 3, 'unique': 2, 'inserted': 2}
    """
    whole = unsharded_hash_table(table)
    check_state(table, state)
    asked = ToInsert(table, state, [requests_of(whole, ids, scores)], epoch)
    (result,) = insert_anywhere([asked], method, return_evicted)
    return result


def insert_anywhere(
    asked: Sequence[ToInsert], method: str, return_evicted: bool
) -> list[tuple[Inserted, dict[str, Any]]]:
    """`dynamic.insert` of several tables, some of which may be sharded."""
    sharded = [k for k, one in enumerate(asked) if one.table.divided]
    alone = [k for k in range(len(asked)) if k not in sharded]
    done = insert_together([asked[k] for k in alone], method, return_evicted) if alone else []
    results = dict(zip(alone, done, strict=True))
    if sharded:
        if return_evicted:
            raise ValueError(
                f"{asked[sharded[0]].table.ids.label}return_evicted: got True for a table that is sharded; "
                "expected False, as every device evicts rows of its own."
            )
        done = insert_over_devices([asked[k] for k in sharded], method)
        results.update(zip(sharded, done, strict=True))
    return [results[k] for k in range(len(asked))]
