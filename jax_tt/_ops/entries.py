"""What is in a hash table, read on the host."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base import words
from jax_tt._directories.hash_directory import COUNTERS, KEYS, TOTALS, directory_of
from jax_tt._directories.placing import entries_of
from jax_tt._kinds.hashed.table import HashTable, checked_hash_table
from jax_tt._table.state import State


def table_keys(table: HashTable, state: State) -> np.ndarray:
    """The keys of a table in the order of their slots. Blocks until the device is done.

    All processes whose devices hold the table call it, and get all of its keys.

    Args:
        table: the `HashTable`, or a `ShardedTable` of one.
        state: its arrays by name.

    Returns:
        A structured array ``[keys]`` with the fields ``key`` (uint64; ``.astype(np.int64)`` for signed keys), ``slot``
        (the row of the wrapped table), ``score`` (uint64) and ``touched`` (the number of the last batch that requested
        the key).

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(1024, 8)
    >>> _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.array([3, -1]))
    >>> sorted(jax_tt.dynamic.keys_of(table, state)["key"].tolist())
    [3, 18446744073709551615]
    """
    table = checked_hash_table(table, state)
    return entries_of(directory_of(state))


def hash_statistics(table: HashTable, state: State) -> dict[str, int | float]:
    """Statistics of a hash table. Blocks until the device is done.

    Returns:
        ``keys`` and ``load``, the number and the share of slots that have a key, and totals of all insertions:
        ``requests`` and ``hits`` are ids; ``unique``, ``unique_hits``, ``inserted``, ``evicted`` and ``refused`` are
        distinct keys, batch by batch.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(1024, 8)
    >>> _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.array([3, 3, -1]))
    >>> statistics = jax_tt.dynamic.statistics(table, state)
    >>> statistics["keys"], statistics["requests"], statistics["inserted"]
    (2, 3, 2)
    """
    table = checked_hash_table(table, state)
    totals, keys = np.asarray(state[TOTALS]), int(jnp.count_nonzero(state[KEYS[2]]))
    statistics: dict[str, Any] = {"keys": keys, "load": keys / table.num_embeddings}
    return statistics | dict(zip(COUNTERS, words.integers(totals).tolist(), strict=True))
