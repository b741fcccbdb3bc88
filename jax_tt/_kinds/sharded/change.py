"""Growth of hash tables that are divided over devices: every device doubles the table of its keys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec as P

from jax_tt._ids.explicit import sharded_over_explicit_axes
from jax_tt._kinds.hashed.change import factor_of, in_new_slots, with_more_slots
from jax_tt._kinds.sharded.programs import Local
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._table.change import Change, Growth, grow
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table
from jax_tt._table.types import State

if TYPE_CHECKING:
    from jax_tt._kinds.hashed.table import HashTable


@grow.register(ShardedTable)
def grown_over_devices(table: ShardedTable, state: State, growth: Growth) -> Change:
    """The table of which every device has a multiple of its slots, a power of 2; keys stay on their devices."""
    if not table.ids.takes_keys:
        return grow.dispatch(Table)(table, state, growth)
    whole, local = table.table, table.local_keys
    factor = factor_of(whole, growth)

    arrays = {name: state[name] for name in table.divided_names}
    moved, source = _on_devices(
        table, Local(_with_more_slots, (local, factor, growth.method)), arrays
    )

    def carried(old: Any, fresh: Any) -> Any:
        if old.shape == fresh.shape:
            return old
        return _on_devices(table, Local(_in_new_slots, ()), (old, source))

    inner = dataclasses.replace(whole.table, num_embeddings=whole.num_embeddings * factor)
    new = dataclasses.replace(table, table=dataclasses.replace(whole, table=inner))
    return Change(new, {**state, **moved}, dict.fromkeys(whole.table.row_names, carried))


def _with_more_slots(
    local: HashTable, factor: int, method: str, own: dict[str, Any]
) -> tuple[dict[str, Any], jax.Array]:
    return with_more_slots(local, own, factor, method)


def _in_new_slots(own: tuple[Any, jax.Array]) -> Any:
    return in_new_slots(*own)


def _on_devices(table: ShardedTable, local: Local, arrays: Any) -> Any:
    """Runs ``local`` on each device's shard."""
    divided = P(table.axes)

    def call(arrays: Any) -> Any:
        return table.group(Lookup()).on_devices(local, (divided,), divided)(arrays)

    return sharded_over_explicit_axes(call, arrays, table.axes)
