"""`clock_of_whole`: hash tables that a user shards are refused where keys are inserted or removed."""

from __future__ import annotations

import jax

from jax_tt._kinds.hashed.table import HashTable
from jax_tt._native.unsharded import check_unsharded
from jax_tt._sets.hash_directory import CLOCK
from jax_tt._table.types import State

_ADVICE = (
    "expected all keys and rows of a hash table on every device, since each of them inserts and removes all keys, and "
    "the table would be gathered. Give every device the rows of its keys, with jax_tt.shard_tables(tables, mesh, "
    "axis), EmbedCollection(..., mesh=mesh, axis=axis) or a jax_tt.tables.ShardedTable, or replicate the table, "
    "jax.device_put(state, NamedSharding(mesh, P()))."
)


def clock_of_whole(table: HashTable, state: State) -> jax.Array:
    """The number of batches of a table, from a state without shards.

    Raises:
        ValueError: an array that keys are inserted into is sharded; in a traced call on a mesh with automatic axes
            once XLA partitions the program.
    """
    names = (*table.table.spec.row_arrays, *table.hash_shapes)
    arrays = {name: state[name] for name in names}
    return state[CLOCK] + check_unsharded(arrays, table.ids.label, _ADVICE)
