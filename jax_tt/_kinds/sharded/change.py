"""Growth of sharded tables: every device grows its shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec as P

from jax_tt._ids.explicit import sharded_over_explicit_axes
from jax_tt._kinds.sharded.programs import Local
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._table.change import Change, Growth, grow, grow_shards
from jax_tt._table.options import Lookup
from jax_tt._table.types import State


@grow.register(ShardedTable)
def grow_sharded(table: ShardedTable, state: State, growth: Growth) -> Change:
    arrays = {name: state[name] for name in table.sharding.names}

    def on_shards(function: Callable[..., Any], static: tuple[Any, ...], arrays: Any) -> Any:
        spec, local = P(table.axes), Local(function, static)

        def call(arrays: Any) -> Any:
            return table.group(Lookup()).on_devices(local, (spec,), spec)(arrays)

        return sharded_over_explicit_axes(call, arrays, table.axes)

    change = grow_shards(table.table, table.sharding.shard, arrays, growth, on_shards)
    new = dataclasses.replace(table, table=change.table)
    return dataclasses.replace(change, table=new, state={**state, **change.state})
