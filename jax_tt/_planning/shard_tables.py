"""`shard_tables`: several tables over the devices of a mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jax_tt._base.arguments import instance_of, mismatch, one_of
from jax_tt._ids.placement import Placement
from jax_tt._kinds.hashed.table import HashTable
from jax_tt._kinds.sharded.options import DEFAULT, Exchange
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._planning.placements import plan_placements
from jax_tt._table.sharding import can_be_placed, can_be_sharded
from jax_tt._table.table import Table


def shard_tables(
    tables: Mapping[str, Table],
    mesh: Mesh,
    axis: str | tuple[str, ...],
    placement: Placement | Mapping[str, Placement] | str | None = None,
    exchange: Exchange | Mapping[str, Exchange] | None = None,
) -> dict[str, Table]:
    """Shards the rows of tables over the devices of a mesh, e.g. for a `Collection`.

    Tables that cannot be sharded, such as tensor trains, are replicated and returned unchanged. The keys of hash tables
    are sharded by a hash, ``Placement.hashed()``; hash tables that read another row for missing keys are replicated.

    Args:
        tables: by name.
        mesh: the devices.
        axis: the mesh axis, or a tuple of axes, to shard the rows over. Devices along the other axes hold the same
            rows.
        placement: of all tables, or by name, e.g. a `DevicePlan`; default `Placement.round_robin`, also for tables that
            are not named. ``"auto"`` asks `plan_placements`, which without a sample of ids assumes random ones.
        exchange: how rows and gradients travel, of all tables or by name; default `Exchange()`.

    Returns:
        `ShardedTable`, or the table itself, by name.

    >>> import jax, jax_tt
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> tables = {"user": jax_tt.dense_table(1000, 16), "item": jax_tt.tt_table(10**6, 16, tt_ranks=4)}
    >>> tables = jax_tt.shard_tables(tables, mesh, "model", {"user": jax_tt.Placement.hashed()})
    >>> [type(table).__name__ for table in tables.values()]
    ['ShardedTable', 'TTTable']
    """
    expected = 'a mapping from names to tables, e.g. {"item": jax_tt.dense_table(1000, 16)}'
    instance_of("tables", tables, Mapping, expected)
    if isinstance(placement, str):
        one_of("placement", placement, ("auto",), ", a Placement, or placements by table")
        placement = _automatic(tables, mesh, axis)
    placements = _by_name("placement", placement, tables, Placement.round_robin())
    chosen = placement if isinstance(placement, Mapping) else {}
    # A placement of all tables does not apply to hash tables.
    placements |= {
        name: Placement.hashed()
        for name, table in tables.items()
        if isinstance(table, HashTable) and name not in chosen
    }
    exchanges = _by_name("exchange", exchange, tables, DEFAULT)
    named = {
        *(placement if isinstance(placement, Mapping) else ()),
        *(exchange if isinstance(exchange, Mapping) else ()),
    }
    return {
        name: ShardedTable(table, mesh, axis, placements[name], exchanges[name])
        if name in named or can_be_sharded(table)
        else table
        for name, table in tables.items()
    }


def _by_name(argument: str, given: Any, tables: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """The value for every table of an argument that is one for all tables, or by name."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(tables, default if given is None else given)
    for name in given:
        if name not in tables:
            known = ", ".join(map(repr, tables))
            raise ValueError(f"{argument}: got the table {name!r}; expected some of {known}.")
    return {name: given.get(name, default) for name in tables}


def _automatic(tables: Mapping[str, Table], mesh: Mesh, axis: Any) -> Mapping[str, Placement]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    known = isinstance(mesh, Mesh) and all(name in mesh.axis_names for name in axes)
    sharded = tuple((name, table) for name, table in tables.items() if can_be_placed(table))
    # `ShardedTable` refuses a mesh or axis that does not fit.
    if not known or not sharded:
        return {}
    return _planned(sharded, math.prod(mesh.shape[name] for name in axes))


# Layers of linen describe their tables anew in every call.
@functools.lru_cache(maxsize=64)
def _planned(tables: tuple[tuple[str, Table], ...], devices: int) -> Mapping[str, Placement]:
    return plan_placements(dict(tables), devices)


def over_mesh(
    tables: Any, mesh: Mesh | None, axis: Any, placement: Any, exchange: Any = None
) -> Any:
    """`shard_tables` with a mesh, and the tables unchanged without one."""
    if mesh is not None:
        if axis is None:
            expected = f"the mesh axis to shard rows over, e.g. axis={mesh.axis_names[-1]!r}"
            raise mismatch("axis", "None beside a mesh", expected)
        return shard_tables(tables, mesh, axis, placement, exchange)
    for name, value in (("axis", axis), ("placement", placement), ("exchange", exchange)):
        if value is not None:
            got = f"{value!r} without a mesh"
            raise mismatch(name, got, 'mesh=, e.g. jax.make_mesh((8,), ("model",))')
    return tables
