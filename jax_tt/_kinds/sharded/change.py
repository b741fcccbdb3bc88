"""Growth of sharded tables: every device grows its shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec as P

from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._kinds.sharded.programs import Local
from jax_tt._kinds.sharded.sharding import PAGES
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._table import checkpoint
from jax_tt._table.change import Change, Growth, grow, grow_shards, reorder, with_cache
from jax_tt._table.check import check_state
from jax_tt._table.copies import freeze, register_wrapper, with_update
from jax_tt._table.state import State
from jax_tt._table.wrapper import default


@grow.register(ShardedTable)
def grow_sharded(table: ShardedTable, state: State, growth: Growth) -> Change:
    arrays = {name: state[name] for name in table.sharding.names}

    def on_shards(function: Callable[..., Any], static: tuple[Any, ...], arrays: Any) -> Any:
        spec, local = P(table.axes), Local(function, static)

        def call(arrays: Any) -> Any:
            return table.group.on_devices(local, (spec,), spec)(arrays)

        return over_explicit_axes(call, arrays, spec)

    change = grow_shards(table.table, table.sharding.shard, arrays, growth, on_shards)
    new = dataclasses.replace(table, table=change.table)
    return dataclasses.replace(change, table=new, state={**state, **change.state})


register_wrapper(ShardedTable)
for function in (reorder, with_cache):
    function.register(ShardedTable, default(function))


@freeze.register(ShardedTable)
def freeze_shards(table: ShardedTable, state: State) -> tuple[ShardedTable, dict[str, Any]]:
    check_state(table, state)
    stored, arrays = freeze(table.stored, state)
    # Hash tables are stored as they are, and others have nothing that says that they are frozen.
    frozen = (
        dataclasses.replace(table, table=stored)
        if table.ids.takes_keys
        else with_update(table, None)
    )
    return frozen, {**arrays, PAGES: state[PAGES]}


@checkpoint.unsharded.register(ShardedTable)
def wrapped(table: ShardedTable) -> Any:
    return table.table


checkpoint.by_row.register(ShardedTable, ShardedTable.by_row)
checkpoint.of_rows.register(ShardedTable, ShardedTable.of_rows)
checkpoint.pieces.register(ShardedTable, ShardedTable.pieces)
checkpoint.in_pieces.register(ShardedTable, ShardedTable.in_pieces)
checkpoint.of_pieces.register(ShardedTable, ShardedTable.of_pieces)
