"""Dumps of hash tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import expect, mismatch, type_of
from jax_tt._base.progress import Progress
from jax_tt._directories.hash_directory import (
    CLOCK,
    KEYS,
    OF_WAITING,
    WAITING,
    KeyDirectory,
    directory_of,
    named_directory,
)
from jax_tt._directories.placing import ENTRY, Sets, directory_with, entries_of, placed
from jax_tt._formats.dump import Dump
from jax_tt._formats.stored import FileError
from jax_tt._jax.on_host import HostRows, like_on_device, on_host, processes_of_rows
from jax_tt._kinds.hashed.table import HashTable, unsharded_hash_table
from jax_tt._native import hash_backend
from jax_tt._ops.changes import (
    changes_since,
    check_follows,
    digests_of,
    held_by,
    staying,
    summed,
)
from jax_tt._ops.dump_content import Content, Loaded
from jax_tt._ops.entries import table_keys
from jax_tt._table.check import check_state
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.wrapper import is_sharded


def content(table: Any, state: State, keys: Any, base: Dump | None) -> Content:
    """What a dump of a table has, or one of the changes since another."""
    sets, table = _opened(table, keys)
    if base is not None:
        base.check(table.features, [], exact=False)
    names, entries = list(table.table.spec.row_arrays), table_keys(table, state)
    processes = processes_of_rows(state[names[0]], entries["slot"])
    entries = entries[np.argsort(processes, kind="stable")]
    digests = digests_of(entries, state, names)
    rest = {name: state[name] for name in sorted({*_rest_names(table), *WAITING} & state.keys())}
    rest = {name: on_host(array) for name, array in rest.items()}
    held = held_by(entries, digests)
    if base is not None:
        entries, held = changes_since(base, held, entries)
    rest |= held
    rows = {name: _reader(state[name]) for name in names}
    about = {
        "digests": summed(digests),
        "base": None if base is None else base.digests,
        **sets._asdict(),
    }
    return Content(
        table.features,
        {name: entries[name] for name in ENTRY.fields or ()},
        {name: str(state[name].dtype) for name in names},
        lambda part: {name: rows[name](entries["slot"][part]) for name in names},
        rest,
        about,
        processes_of_rows(state[names[0]], entries["slot"]),
    )


def loaded(
    table: Any,
    state: State,
    dump: Dump,
    keys: Any,
    optimizer_state: bool,
    overflow: str,
    method: str,
    bar: Progress,
) -> tuple[Loaded, dict[str, Any]]:
    """Puts the keys of a dump into a table, with their rows, scores and last batches."""
    sets, table = _opened(table, keys)
    check_state(table, state)
    wanted = table.table.spec.row_arrays
    taken = list(wanted) if optimizer_state else list(table.table.spec.row_names)
    dump.check(table.features, taken, exact=optimizer_state)
    method = table.execution(Lookup(method=method), state).method
    held = table_keys(table, state)
    new = _keys_of(dump)
    with_rows = np.concatenate([held["key"], new["key"]])
    changed, forgotten = _others(table, state, sets, dump, optimizer_state, with_rows)
    if dump.base is not None:
        digests = digests_of(held, state, taken)
        check_follows(dump, table.ids.label, digests, held["key"], new["key"])
    # Dumps of tiers have none.
    clock = int(changed.get(CLOCK, state[CLOCK]))
    kept, new = _placed(table, held, new, sets, dump, clock, overflow)
    here = new["slot"] >= 0
    entries = np.concatenate([kept, new[here]])
    changed |= named_directory(directory_with(entries, sets, table.ids.label))
    # One copy, which the files are then written into: on the device, or of several devices on the host.
    arrays: dict[str, Any] = {
        name: jnp.copy(state[name]) if _on_one(state[name]) else HostRows(state[name], copied=True)
        for name in wanted
    }
    _, before, after = np.intersect1d(held["key"], kept["key"], return_indices=True)
    before, after = held["slot"][before], kept["slot"][after]
    moved = before != after
    if moved.any():
        for name in wanted:
            rows = _reader(state[name])(before[moved])
            arrays[name] = _written(arrays[name], rows, after[moved], method)
    first = 0
    for part in dump.parts({name: state[name].shape[1:] for name in taken}):
        of_part = slice(first, first + len(part["key"]))
        slots, first = new["slot"][of_part][here[of_part]], of_part.stop
        for name, value in wanted.items():
            rows = part[name][here[of_part]] if name in part else value
            arrays[name] = _written(arrays[name], rows, slots, method)
        bar.step()
    changed = {name: like_on_device(state[name], value) for name, value in changed.items()}
    arrays = {name: x.array() if isinstance(x, HostRows) else x for name, x in arrays.items()}
    left = len(np.union1d(held["key"], new["key"])) - len(entries)
    counts = Loaded(int(here.sum()), evicted=left, forgotten=forgotten)
    return counts, {**state, **arrays, **changed}


def _placed(
    table: HashTable,
    held: np.ndarray,
    new: np.ndarray,
    sets: Sets,
    dump: Dump,
    clock: int,
    overflow: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Places keys: the other keys that stay in the table, and the keys of the dump in the order of its files.

    The slots of keys of the dump that find no room are -1.
    """
    others = held[~np.isin(held["key"], new["key"])]
    if dump.base is not None:
        others = staying(dump, others, same_sets=dump.sets == sets)
    if dump.sets == sets:
        _check_slots(new, sets, dump.path)
        if not np.isin(others["slot"], new["slot"]).any():
            return others, new
    new["slot"] = -1
    _, there, here = np.intersect1d(held["key"], new["key"], return_indices=True)
    new["slot"][here] = held["slot"][there]
    entries, what = np.concatenate([others, new]), f"{table.ids.label}table"
    entries = placed(entries, sets, table.eviction, clock, what, overflow)
    others, new = entries[: len(others)], entries[len(others) :]
    return others[others["slot"] >= 0], new


def _keys_of(dump: Dump) -> np.ndarray:
    """The keys of all files, with their slots if there are any."""
    parts = []
    for part in dump.parts({}):
        parts.append(np.zeros(len(part["key"]), ENTRY))
        for name in ENTRY.names or ():
            parts[-1][name] = part.get(name, -1)
    entries = np.concatenate([np.zeros(0, ENTRY), *parts])
    if len(entries) != dump.keys or len(np.unique(entries["key"])) < len(entries):
        raise FileError(
            f"{dump.path}: is damaged; it has {len(np.unique(entries['key']))} different keys, not {dump.keys}."
        )
    if (entries["touched"] <= 0).any():
        raise FileError(f"{dump.path}: is damaged; keys have no last batch.")
    return entries


def _check_slots(entries: np.ndarray, sets: Sets, path: str) -> None:
    slots = entries["slot"]
    fits = (sets.homes(entries["key"]) == slots // sets.ways).any(axis=0).all()
    if not fits or len(np.unique(slots)) < len(slots):
        raise FileError(f"{path}: is damaged; keys are in slots that they cannot have.")


def _others(
    table: HashTable,
    state: State,
    sets: Sets,
    dump: Dump,
    optimizer_state: bool,
    with_rows: np.ndarray,
) -> tuple[dict[str, Any], int]:
    """The arrays of the dump that do not belong to single keys of the table, as they are afterwards.

    ``with_rows`` are the keys of the table and of the files of the dump. Also returns how many waiting keys are
    forgotten.
    """
    rest = dump.rest({*_rest_names(table), *WAITING})
    arrays = {}
    for name in _rest_names(table) & rest.keys():
        if not (optimizer_state or name.startswith("hash_")):
            continue
        if rest[name].shape != state[name].shape:
            got, expected = f"{name} of shape {rest[name].shape}", state[name].shape
            raise mismatch(dump.path, got, f"{expected}, as in the table", error=FileError)
        arrays[name] = rest[name]
    if dump.base is None:
        # The batches of both tables lie in the past. The dump of a table without batches is of batch 1.
        arrays[CLOCK] = np.maximum(np.asarray(state[CLOCK]), arrays.get(CLOCK, 1))
    forgotten = 0
    if table.waiting_sets:
        sets = sets._replace(sets=table.waiting_sets)
        entries = _waiting(state, sets, dump, rest, with_rows)
        if (entries["slot"] < 0).any():
            # Counters, which never are a reason to refuse a dump.
            entries = placed(entries, sets, OF_WAITING, 0, "")
        kept = entries[entries["slot"] >= 0]
        arrays |= named_directory(directory_with(kept, sets, table.ids.label), WAITING)
        forgotten = len(entries) - len(kept)
    return arrays, forgotten


def _waiting(
    state: State, sets: Sets, dump: Dump, rest: dict[str, np.ndarray], with_rows: np.ndarray
) -> np.ndarray:
    """The keys that wait for admission in the table and in the dump, without those that have a row.

    They are without slots where they are to be placed in the sets of the table.
    """
    held = entries_of(directory_of(state, WAITING))
    held = held[~np.isin(held["key"], with_rows)]
    if WAITING[0] not in rest:
        return held
    given = KeyDirectory(*(rest[name] for name in WAITING))
    new = entries_of(given)
    if dump.base is None:
        held, new = held[~np.isin(held["key"], new["key"])], new[~np.isin(new["key"], with_rows)]
    else:
        held = held[:0]
    if not len(held) and Sets(given.sets, given.ways, dump.devices) == sets:
        return new
    new["slot"] = -1
    return np.concatenate([held, new])


def _on_one(array: jax.Array) -> bool:
    return len(array.sharding.device_set) == 1


def _reader(array: jax.Array) -> Callable[[np.ndarray], np.ndarray]:
    """A function from slots to entries ``[n, ...]``, of slots on devices of this process."""
    if _on_one(array):
        return lambda slots: np.asarray(array[slots])
    return HostRows(array).read


def _written(array: Any, entries: Any, slots: np.ndarray, method: str) -> Any:
    """An array with entries ``[n, ...]``, or a scalar, in distinct slots. It is overwritten."""
    if isinstance(array, HostRows):
        array.write(slots, entries)
        return array
    # In ascending order, as `exchange` takes them.
    order = np.argsort(slots, kind="stable")
    new = jnp.asarray(entries[order] if np.ndim(entries) else entries, array.dtype)
    return _exchanged(array, new, slots[order], method)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _exchanged(array: Any, new: Any, slots: jax.Array, method: str) -> Any:
    return hash_backend.exchange([array], [new], slots, method, return_old=False)[0][0]


def _opened(sharded: Any, keys: Any) -> tuple[Sets, HashTable]:
    """The sets of a table and the table that one device would have."""
    table = unsharded_hash_table(sharded)
    if not table.table.spec.row_names:
        got = f"{type_of(table.table)}, whose rows share parameters"
        fix = "Save its state like the state of any table: its shapes do not change."
        raise mismatch(f"{table.ids.label}table", got, "a hash_table", fix, TypeError)
    expect(keys is None, f"{table.ids.label}keys", "keys for a hash table, which has some", "None")
    devices = sharded.layout.devices if is_sharded(sharded) else 1
    return Sets(table.sets, table.ways, devices), table


def _rest_names(table: HashTable) -> set[str]:
    """The arrays that do not belong to single keys of the table."""
    return {*table.spec.trained_names, *table.hash_shapes} - {
        *table.table.spec.row_arrays,
        *KEYS,
        *WAITING,
    }
