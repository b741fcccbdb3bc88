"""States of hash tables for other devices or another capacity, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._sets.hash_directory import KEYS, WAITING, KeyDirectory, directory_of, named_directory
from jax_tt._sets.placing import Sets, directory_with, entries_of, placed


def by_device(arrays: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """Arrays of keys with a first axis of devices, which tells where their keys are; of one device as they are."""
    if devices == 1:
        return dict(arrays)
    return {name: x.reshape(devices, -1, *x.shape[1:]) for name, x in arrays.items()}


def stay_in_slots(table: Any, state: Mapping[str, Any], devices: int) -> bool:
    """Whether all keys of a state keep their slots in `relocated`."""
    return all(
        sets_of(state[names[2]]) == sets for names, sets in _directories(table, devices).items()
    )


def relocated(table: Any, state: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The state of the same keys with the slots of ``table`` over a number of devices, the first ones first.

    Where the slots are divided as they were, every array is as it was, bit for bit. Otherwise the keys are placed anew.

    Args:
        table: the whole `HashTable`.
        state: of any capacity and any number of devices, whose arrays of keys are those of `by_device`.
        devices: that own the keys.

    Raises:
        ValueError: there is no room for all keys, or their rows share parameters.
        TypeError: keys would have to be placed anew, but the arrays are traced.
    """
    directories = _directories(table, devices)
    table.require(state, tuple(name for names in directories for name in names))
    sets = directories.pop(KEYS)
    entries, after = _in_sets(table, directory_of(state), sets, "state")
    found = {**state, **named_directory(after)}
    if entries is not None:
        found |= _moved_rows(table, state, *entries)
    for waiting in directories.values():
        found |= named_directory(
            waiting_keys(table, directory_of(state, WAITING), waiting), WAITING
        )
    return found


def waiting_keys(table: Any, directory: KeyDirectory, sets: Sets) -> KeyDirectory:
    """The keys that wait for admission, with their counts, in other sets."""
    return _in_sets(table, directory, sets, "admission: of the keys that wait")[1]


def _directories(table: Any, devices: int) -> dict[tuple[str, ...], Sets]:
    """The names of the arrays of the directories of a table, and how their slots are divided."""
    found = {KEYS: Sets(table.sets, table.ways, devices)}
    if table.waiting_sets:
        found[WAITING] = Sets(table.waiting_sets, table.ways, devices)
    return found


def sets_of(touched: Any) -> Sets:
    """How the slots of a directory are divided, by the shape of its last batches."""
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
    names = list(table.table.row_arrays)
    if not names:
        raise ValueError(
            f"{table.ids.label}state: got keys in other slots for a {type(table.table).__name__}, whose rows share "
            "parameters; expected the state of a table with this capacity and these ways."
        )
    found = {}
    for name in names:
        rows = np.asarray(state[name])
        moved = np.zeros((table.num_embeddings, *rows.shape[1:]), rows.dtype)
        moved[new["slot"]] = rows[old["slot"]]
        found[name] = jnp.asarray(moved)
    return found
