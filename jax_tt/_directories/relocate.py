"""States of hash tables for other devices or another capacity, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._base.reports import report_moved
from jax_tt._base.storage import require_arrays
from jax_tt._directories.hash_directory import (
    CLOCK,
    KEYS,
    OF_WAITING,
    WAITING,
    KeyDirectory,
    directory_of,
    named_directory,
)
from jax_tt._directories.placing import Sets, directory_with, entries_of, placed


def by_device(arrays: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """Splits arrays of keys by device along a first axis, which tells where keys are; no axis for one device."""
    if devices == 1:
        return dict(arrays)
    return {name: x.reshape(devices, -1, *x.shape[1:]) for name, x in arrays.items()}


def stay_in_slots(table: Any, state: Mapping[str, Any], devices: int) -> bool:
    """Whether all keys of a state keep their slots in `relocated`."""
    return all(
        sets_of(state[names[2]]) == sets for names, sets in _directories(table, devices).items()
    )


class Move(NamedTuple):
    """Where the keys of a table go.

    Attributes:
        arrays: of the directories afterwards, by name.
        capacity: of the table afterwards.
        slots: the slots of the keys that stay in the table, before and after; None where all of them stay in theirs.
    """

    arrays: dict[str, Any]
    capacity: int
    slots: tuple[np.ndarray, np.ndarray] | None

    def rows(self, array: Any) -> Any:
        """An array of entries of slots afterwards; where keys move, on the host, with zeros in slots without a key."""
        if self.slots is None:
            return array
        (before, after), rows = self.slots, np.asarray(array)
        moved = np.zeros((self.capacity, *rows.shape[1:]), rows.dtype)
        moved[after] = rows[before]
        return moved


def relocated(table: Any, state: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The state after `move_of`; where the slots are the same, every array is returned bit for bit."""
    move = move_of(table, state, devices)
    moved = {name: move.rows(state[name]) for name in table.table.spec.row_arrays}
    return {**state, **jax.tree.map(jnp.asarray, move.arrays | moved)}


def move_of(table: Any, state: Mapping[str, Any], devices: int) -> Move:
    """Places the keys of a state in the slots of ``table`` over a number of devices, the slots of the first one first.

    A warning says how many keys find no room, unless ``safe_check="ignore"``.

    Args:
        table: the whole `HashTable`.
        state: the arrays of keys, of any capacity and any number of devices, as `by_device` returns them.
        devices: the number of devices.

    Raises:
        ValueError: keys find no room, and the policy of the table evicts none.
    """
    directories = _directories(table, devices)
    require_arrays(table, state, tuple(name for names in directories for name in names))
    arrays, lost, slots = {}, {}, None
    for names, sets in directories.items():
        directory = directory_of(state, names)
        before = sets_of(directory.touched)
        if before == sets:
            arrays |= named_directory(_flat(directory, before), names)
            continue
        old, new = _placed(table, state, directory, sets, names)
        kept = new["slot"] >= 0
        lost[names] = int(np.count_nonzero(~kept))
        after = directory_with(new[kept], sets, table.ids.label)
        arrays |= named_directory(after, names)
        if names == KEYS:
            slots = old["slot"][kept], new["slot"][kept]
    if any(lost.values()) and table.safe_check != "ignore":
        report_moved(table.ids.label, lost.get(KEYS, 0), lost.get(WAITING, 0))
    return Move(arrays, table.num_embeddings, slots)


def _directories(table: Any, devices: int) -> dict[tuple[str, ...], Sets]:
    """The sets of the directories of a table, by the names of their arrays."""
    sets = {KEYS: Sets(table.sets, table.ways, devices)}
    if table.waiting_sets:
        sets[WAITING] = Sets(table.waiting_sets, table.ways, devices)
    return sets


def sets_of(touched: Any) -> Sets:
    """The sets of a directory, from the shape of its last batches."""
    *devices, sets, ways = touched.shape
    return Sets(int(np.prod(devices)) * sets, ways, int(np.prod(devices)))


def _placed(
    table: Any,
    state: Mapping[str, Any],
    directory: KeyDirectory,
    sets: Sets,
    names: tuple[str, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """The entries of a directory, and the same in other sets."""
    before, what = sets_of(directory.touched), f"{table.ids.label}state"
    if any(isinstance(array, Tracer) for array in directory):
        raise TypeError(
            f"{what}: got traced arrays of {before.capacity} rows with ways={before.ways} on {before.devices} devices; "
            f"expected {sets.capacity}, {sets.ways} and {sets.devices}, or concrete arrays: keys get other slots "
            "outside of jit."
        )
    if names == KEYS and not table.table.spec.row_arrays:
        got = f"keys in other slots for {type_of(table.table)}, whose rows share parameters"
        raise mismatch(what, got, "the state of a table with this capacity and these ways")
    require_arrays(table, state, (CLOCK,))
    old = entries_of(_flat(KeyDirectory(*map(np.asarray, directory)), before))
    entries = old.copy()
    entries["slot"] = -1
    eviction = table.eviction if names == KEYS else OF_WAITING
    return old, placed(entries, sets, eviction, int(state[CLOCK]), what)


def _flat(directory: KeyDirectory, sets: Sets) -> KeyDirectory:
    """A directory without an axis of devices."""
    words = sets.sets, 2, sets.ways
    keys, scores, touched = directory
    return KeyDirectory(
        keys.reshape(words), scores.reshape(words), touched.reshape(sets.sets, sets.ways)
    )
