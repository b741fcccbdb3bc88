"""What becomes of a hash table that grows between steps, is frozen, or is sharded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_int, concrete, expect, mismatch
from jax_tt._directories.admission import AdmitAfter
from jax_tt._directories.hash_directory import (
    KEYS,
    WAITING,
    KeyDirectory,
    directory_of,
    named_directory,
)
from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._ids.placement import Layout
from jax_tt._kinds.hashed.table import HashTable, checked_hash_table
from jax_tt._native import hash_backend
from jax_tt._table.change import (
    Change,
    Growth,
    OnShards,
    Orders,
    grow,
    grow_shards,
    reorder,
    under_order,
    with_cache,
)
from jax_tt._table.checkpoint import of_rows
from jax_tt._table.copies import freeze, freeze_wrapper, register_wrapper, with_update
from jax_tt._table.options import Update
from jax_tt._table.sharding import check_sharding, rows_to_shard, shard_of
from jax_tt._table.state import State
from jax_tt._table.wrapper import default


@functools.singledispatch
def grow_if_full(
    table: HashTable, state: State, *, max_load: float = 0.75, method: str = "auto"
) -> Change:
    """Doubles the capacity of a table for as long as its load exceeds a limit and ``max_capacity`` allows it.

    Call it between steps, outside of ``jit``; it waits for the device. Every key keeps its row and its optimizer state,
    bit for bit. Functions that were compiled for the table are compiled again if it has grown.

    Args:
        table: the `HashTable`, or a `ShardedTable` of one; or a `Collection`, of which every hash table may grow.
        state: its arrays by name; those of a collection by table and name.
        max_load: the share of occupied slots, from 0 to 1, above which the table grows.
        method: as in `Lookup`.

    Returns:
        The table and the state, as they were if the table has not grown.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(64, 8, policy="none", max_capacity=256)
    >>> _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.arange(40))
    >>> table, state = jax_tt.dynamic.grow_if_full(table, state, max_load=0.5)
    >>> table.num_embeddings, state["embedding"].shape
    (128, (128, 8))
    """
    whole = checked_hash_table(table, state)
    capacity = grown_capacity(whole, state, max_load)
    if capacity == whole.num_embeddings:
        return Change(table, dict(state), {})
    change = grow(table, state, growth_to(whole, capacity, method))
    before, after = (_occupied(arrays) for arrays in (state, change.state))
    if before != after:
        raise RuntimeError(f"{whole.ids.label}table: {after} of {before} keys would be left.")
    return change


def grown_capacity(table: HashTable, state: State, max_load: Any) -> int:
    """The capacity that a table is to have, at least the present one."""
    number = isinstance(max_load, int | float) and not isinstance(max_load, bool)
    expect(number and 0 <= max_load <= 1, "max_load", repr(max_load), "a number from 0 to 1")
    touched = state[KEYS[2]]
    concrete(f"{table.ids.label}state", touched, "A table grows between steps, outside of jit.")
    occupied = _occupied(state)
    capacity, most = table.num_embeddings, table.max_capacity or table.num_embeddings
    while occupied > max_load * capacity and 2 * capacity <= most:
        capacity *= 2
    return capacity


def _occupied(state: State) -> int:
    return int(jnp.sum(state[KEYS[2]] > 0))


def growth_to(table: HashTable, capacity: int, method: str = "auto") -> Growth:
    """Growth with initial slices of tensor trains that depend on the seed and the capacity alone."""
    key = jax.random.fold_in(jax.random.key(table.seed & 0xFFFFFFFF), capacity)
    return Growth(capacity, key, None, method)


@grow.register(HashTable)
def grown(table: HashTable, state: State, growth: Growth) -> Change:
    """The table with a multiple of its capacity, a power of 2."""
    if table.table.spec.row_arrays:
        return grow_slots(table, table, state, growth, lambda f, static, x: f(*static, x))
    moved, source = _with_more_slots(table, _factor_of(table, growth), growth.method, state)
    kept = {name: value for name, value in state.items() if name not in table.hash_shapes}
    change = _of_shared_rows(table, kept, growth, np.asarray(source))
    new = dataclasses.replace(table, table=change.table)
    after = {name: value for name, value in state.items() if name in table.hash_shapes}
    return Change(new, {**change.state, **after, **moved}, change.carry)


@grow_shards.register(HashTable)
def grow_slots(
    table: HashTable, shard: HashTable, state: State, growth: Growth, on_shards: OnShards
) -> Change:
    """As `grown`, for tables with a row for every key; keys stay on their devices."""
    factor = _factor_of(table, growth)
    moved, source = on_shards(_with_more_slots, (shard, factor, growth.method), dict(state))
    inner = dataclasses.replace(table.table, num_embeddings=table.num_embeddings * factor)

    def carried(old: Any, fresh: Any) -> Any:
        return old if old.shape == fresh.shape else on_shards(_in_new_slots, (), (old, source))

    new = dataclasses.replace(table, table=inner)
    return Change(new, {**state, **moved}, dict.fromkeys(table.table.spec.row_names, carried))


def _with_more_slots(
    table: HashTable, factor: int, method: str, state: State
) -> tuple[dict[str, Any], jax.Array]:
    """The arrays of keys and rows with ``factor`` times the slots.

    Also returns the old slot of every new one; -1 for empty slots.
    """
    names = list(table.table.spec.row_arrays)
    numbers = jnp.arange(table.num_embeddings, dtype=jnp.int32) + 1
    arrays = [*(state[name] for name in names), numbers]
    directory, (*arrays, numbers) = _doubled(directory_of(state), arrays, factor, method)
    after = {**dict(zip(names, arrays, strict=True)), **named_directory(directory)}
    admission = table.admission
    if isinstance(admission, AdmitAfter) and admission.waiting is None:
        waiting, _ = _doubled(directory_of(state, WAITING), [], factor, method)
        after |= named_directory(waiting, WAITING)
    return after, numbers - 1


def _in_new_slots(moved: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Entries ``[capacity, ...]`` of old slots in the new ones; 0 for empty slots."""
    old, source = moved
    places = jnp.where(source < 0, old.shape[0], source)
    return old.at[places].get(mode="fill", fill_value=0)


def _doubled(
    directory: KeyDirectory, arrays: list[jax.Array], factor: int, method: str
) -> tuple[KeyDirectory, list[jax.Array]]:
    """The directory with ``factor`` times the sets, and the entries of its keys in their new slots."""
    while factor > 1:
        directory, arrays = hash_backend.double(directory, arrays, method)
        factor //= 2
    return directory, arrays


def _factor_of(table: HashTable, growth: Growth) -> int:
    """How many times the capacity grows."""
    capacity, old = as_int("num_embeddings", growth.num_embeddings), table.num_embeddings
    factor = capacity // old
    if growth.like is not None:
        expected = "None, since new rows of a HashTable belong to no key yet"
        raise mismatch(f"{table.ids.label}like", "ids", expected)
    if capacity % old or factor < 1 or factor & (factor - 1):
        expected = f"the capacity {old} times a power of 2"
        raise mismatch(f"{table.ids.label}num_embeddings", capacity, expected)
    if table.max_capacity is not None and capacity > table.max_capacity:
        expected = f"at most max_capacity, {table.max_capacity}"
        raise mismatch(f"{table.ids.label}num_embeddings", capacity, expected)
    return factor


@reorder.register(HashTable)
def reordered(table: HashTable, state: State, orders: Orders) -> Change:
    del state, orders
    raise TypeError(
        f"{table.ids.label}id_order: a HashTable maps keys to rows itself; expected the order in the wrapped table, "
        "e.g. HashTable(OrderedTable(table, id_order))."
    )


def _of_shared_rows(
    table: HashTable, state: dict[str, Any], growth: Growth, source: np.ndarray
) -> Change:
    """An order of slots lets keys keep their row in another slot."""
    ordered = ID_ORDER in table.table.spec.buffers
    old = np.arange(table.num_embeddings)
    if ordered:
        old = np.asarray(IdOrder(state[ID_ORDER]).rows[:])
    taken, rows = source >= 0, np.empty(source.size, np.int64)
    rows[taken] = old[source[taken]]
    rows[~taken] = np.setdiff1d(np.arange(rows.size), rows[taken])
    change = grow(table.table, state, growth)
    if ordered:
        change = dataclasses.replace(change, table=change.table.table)
    return under_order(change.table, change, IdOrder(rows))


register_wrapper(HashTable)
of_rows.register(HashTable, HashTable.of_rows)
with_cache.register(HashTable, default(with_cache))


@with_update.register(HashTable)
def with_update_of_rows(table: HashTable, update: Update | None) -> HashTable:
    # Without the update that it had, nothing trains the table; one that never had an update is trained by others.
    frozen = update is None and (table.frozen or table.update is not None)
    return dataclasses.replace(table, table=with_update(table.table, update), frozen=frozen)


@freeze.register(HashTable)
def freeze_keys(table: HashTable, state: State) -> tuple[HashTable, dict[str, Any]]:
    frozen, arrays = freeze_wrapper(table, state)
    return dataclasses.replace(frozen, frozen=True), arrays


# The hash of a key says which device holds it, and every device has a table of its keys.


@rows_to_shard.register(HashTable)
def rows_of_keys(table: HashTable) -> dict[str, float | None]:
    if not isinstance(table.missing, str):
        got = f"{table.missing!r} for a hash table that is sharded"
        expected = "'initial' or 'zeros', since one device alone has the row of a number"
        raise mismatch(f"{table.ids.label}missing", got, expected)
    rows_to_shard(table.table)  # raises
    return table.table.spec.row_arrays


@check_sharding.register(HashTable)
def check_sharded_keys(table: HashTable, layout: Layout) -> None:
    if not layout.hashed:
        expected = "Placement.hashed(), as the hash of a key says which device has its row"
        raise mismatch(f"{table.ids.label}placement", "rows sharded by their numbers", expected)
    unit = layout.devices * table.ways
    if table.num_embeddings % unit:
        got = f"{table.num_embeddings} rows for {layout.devices} devices and sets of {table.ways}"
        expected = f"a multiple of {unit}, e.g. {-(-table.num_embeddings // unit) * unit}"
        raise mismatch(f"{table.ids.label}capacity", got, expected)
    if table.waiting_sets % layout.devices:
        keys = table.waiting_sets * table.ways
        got = f"{table.admission!r}, which is room for {keys} waiting keys"
        expected = (
            f"a multiple of {unit}, the devices times the ways, e.g. {-(-keys // unit) * unit}"
        )
        raise mismatch(f"{table.ids.label}admission", got, expected)
    check_sharding(table.table, layout)


@shard_of.register(HashTable)
def shard_of_keys(table: Any, num_embeddings: int, features: int) -> HashTable:
    admission = table.admission
    if isinstance(admission, AdmitAfter) and admission.waiting is not None:
        sets = table.waiting_sets * num_embeddings // table.num_embeddings
        admission = dataclasses.replace(admission, waiting=sets * table.ways)
    most = table.max_capacity
    if most is not None:
        most = num_embeddings * (most // table.num_embeddings)
    rows = shard_of(table.table, num_embeddings, features)
    return dataclasses.replace(table, table=rows, admission=admission, max_capacity=most)
