"""States of hash tables for other devices or another capacity, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._base.storage import require_arrays
from jax_tt._directories.hash_directory import (
    KEYS,
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


def relocated(table: Any, state: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """Moves the keys of a state to the slots of ``table`` over a number of devices, the slots of the first one first.

    Where the slots are the same, every array is returned bit for bit. Otherwise the keys are placed anew.

    Args:
        table: the whole `HashTable`.
        state: of any capacity and any number of devices, with arrays of keys as `by_device` returns them.
        devices: the number of devices.
    """
    directories = _directories(table, devices)
    require_arrays(table, state, tuple(name for names in directories for name in names))
    sets = directories.pop(KEYS)
    entries, after = _in_sets(table, directory_of(state), sets, "state")
    after = {**state, **named_directory(after)}
    if entries is not None:
        after |= _moved_rows(table, state, *entries)
    for waiting in directories.values():
        moved = waiting_keys(table, directory_of(state, WAITING), waiting)
        after |= named_directory(moved, WAITING)
    return after


def waiting_keys(table: Any, directory: KeyDirectory, sets: Sets) -> KeyDirectory:
    """The keys that wait for admission, with their counts, in other sets."""
    return _in_sets(table, directory, sets, "admission: of the keys that wait")[1]


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


def _in_sets(
    table: Any, directory: KeyDirectory, sets: Sets, what: str
) -> tuple[tuple[np.ndarray, np.ndarray] | None, KeyDirectory]:
    """The entries before and after, or None where they are the same, and the directory after."""
    before, what = sets_of(directory.touched), f"{table.ids.label}{what}"
    if before == sets:
        return None, _flat(directory, before)
    if any(isinstance(array, Tracer) for array in directory):
        raise TypeError(
            f"{what}: got traced arrays of {before.capacity} rows with ways={before.ways} on {before.devices} devices; "
            f"expected {sets.capacity}, {sets.ways} and {sets.devices}, or concrete arrays: keys get other slots "
            "outside of jit."
        )
    old = entries_of(_flat(KeyDirectory(*map(np.asarray, directory)), before))
    entries = old.copy()
    entries["slot"] = -1
    new = placed(entries, sets, what)
    return (old, new), KeyDirectory(*map(jnp.asarray, directory_with(new, sets, table.ids.label)))


def _flat(directory: KeyDirectory, sets: Sets) -> KeyDirectory:
    """A directory without an axis of devices."""
    words = sets.sets, 2, sets.ways
    keys, scores, touched = directory
    return KeyDirectory(
        keys.reshape(words), scores.reshape(words), touched.reshape(sets.sets, sets.ways)
    )


def _moved_rows(
    table: Any, state: Mapping[str, Any], old: np.ndarray, new: np.ndarray
) -> dict[str, jnp.ndarray]:
    """The rows of keys in their new slots, and zeros in the others."""
    names = list(table.table.spec.row_arrays)
    if not names:
        got = f"keys in other slots for {type_of(table.table)}, whose rows share parameters"
        expected = "the state of a table with this capacity and these ways"
        raise mismatch(f"{table.ids.label}state", got, expected)
    arrays = {}
    for name in names:
        rows = np.asarray(state[name])
        moved = np.zeros((table.num_embeddings, *rows.shape[1:]), rows.dtype)
        moved[new["slot"]] = rows[old["slot"]]
        arrays[name] = jnp.asarray(moved)
    return arrays
