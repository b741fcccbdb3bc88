"""Sharding of hash tables: the hash of a key says which device holds it, and every device has a table of its keys."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_tt._ids.placement import Layout
from jax_tt._kinds.hashed.table import HashTable
from jax_tt._sets.admission import AdmitAfter
from jax_tt._table.sharding import check_sharding, rows_to_shard, shard_of


@rows_to_shard.register(HashTable)
def rows_of_keys(table: HashTable) -> dict[str, float | None]:
    if not isinstance(table.missing, str):
        raise ValueError(
            f"{table.ids.label}missing: got {table.missing!r} for a hash table that is sharded; expected 'initial' or "
            "'zeros', since one device alone has the row of a number."
        )
    rows_to_shard(table.table)  # raises
    return table.table.spec.row_arrays


@check_sharding.register(HashTable)
def check_sharded_keys(table: HashTable, layout: Layout) -> None:
    if not layout.hashed:
        raise ValueError(
            f"{table.ids.label}placement: got rows that are sharded by their numbers for a HashTable; expected "
            "Placement.hashed(), as the hash of a key says which device has its row."
        )
    unit = layout.devices * table.ways
    if table.num_embeddings % unit:
        raise ValueError(
            f"{table.ids.label}capacity: got {table.num_embeddings} rows for {layout.devices} devices and sets of "
            f"{table.ways} rows; expected a multiple of {unit}, e.g. {-(-table.num_embeddings // unit) * unit}."
        )
    if table.waiting_sets % layout.devices:
        got = table.waiting_sets * table.ways
        raise ValueError(
            f"{table.ids.label}admission: got {table.admission!r}, which is room for {got} waiting keys, for "
            f"{layout.devices} devices and sets of {table.ways} keys; expected a multiple of {unit}, e.g. "
            f"waiting={-(-got // unit) * unit}."
        )
    check_sharding(table.table, layout)


@shard_of.register(HashTable)
def shard_of_keys(table: Any, layout: Layout) -> HashTable:
    admission = table.admission
    if isinstance(admission, AdmitAfter) and admission.waiting is not None:
        waiting = table.waiting_sets // layout.devices * table.ways
        admission = dataclasses.replace(admission, waiting=waiting)
    return dataclasses.replace(table, table=shard_of(table.table, layout), admission=admission)
