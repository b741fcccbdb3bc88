"""Dumps, loads and moves of hash tables over devices, capacities and loads.

All keys that have room are there, and the others are counted, or it is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import jax_tt
from jax_tt import Placement
from jax_tt._directories.hash_directory import (
    KEYS,
    POLICIES,
    WAITING,
    Eviction,
    KeyDirectory,
    MissingKeyWarning,
    named_directory,
)
from jax_tt._directories.placing import ENTRY, Sets, directory_with, entries_of, placed
from jax_tt._directories.relocate import sets_of
from jax_tt._table.checkpoint import by_row, of_rows, unsharded
from jax_tt._table.wrapper import is_sharded
from jax_tt.tables import ShardedTable
from tests.kinds.hashed.hash_model import staying

WAYS = ("dump", "changes", "rows", "collection", "frozen", "pieces", "grown")


@functools.cache
def _mesh(devices: int) -> Any:
    kind = (AxisType.Auto,)
    return jax.make_mesh((devices,), ("model",), axis_types=kind, devices=jax.devices()[:devices])


def _table(rng: np.random.Generator, plain: Any = None) -> Any:
    """A table of some capacity on some devices; with another's policies, columns and optimizer."""
    ways, devices = int(rng.choice([4, 8])), int(rng.choice([1, 2, 4]))
    capacity = int(rng.choice([2, 3, 8])) * 4 * 8
    if plain is None:
        plain = jax_tt.hash_table(
            capacity,
            3,
            ways=ways,
            optimizer=[jax_tt.optimizers.Adagrad(0.1), jax_tt.optimizers.Adam(0.1), None][
                rng.integers(3)
            ],
            policy=str(rng.choice(POLICIES)),
            min_age=int(rng.choice([1, 4])),
            admission=[None, 3, jax_tt.dynamic.AdmitAfter(2, waiting=64)][rng.integers(3)],
            max_capacity=32 * capacity,
        )
    else:
        inner = dataclasses.replace(plain.table, num_embeddings=capacity)
        plain = dataclasses.replace(plain, table=inner, ways=ways, max_capacity=32 * capacity)
    if devices == 1:
        return plain
    return ShardedTable(plain, _mesh(devices), "model", Placement.hashed())


def _sets(table: Any) -> Sets:
    own = unsharded(table)
    return Sets(own.sets, own.ways, table.layout.devices if is_sharded(table) else 1)


def _directory(rng: np.random.Generator, sets: Sets, load: float) -> KeyDirectory:
    """About as many keys as a share of the slots; all of them with 1."""
    count = int(load * sets.capacity) if load < 1 else 4 * sets.capacity
    entries = np.zeros(count, ENTRY)
    entries["key"] = np.unique(rng.integers(0, 2**64, 2 * count, np.uint64))[:count]
    rng.shuffle(entries["key"])
    entries["slot"] = -1
    entries["score"] = rng.integers(0, 2 ** int(rng.choice([3, 40])), count, np.uint64)
    entries["touched"] = rng.integers(1, 9, count)
    entries = placed(entries, sets, Eviction("custom"), 0, "keys")
    return directory_with(entries[entries["slot"] >= 0], sets, "")


def _state(rng: np.random.Generator, table: Any, load: float) -> dict[str, Any]:
    state, sets = dict(table.init(jax.random.key(0))), _sets(table)
    found = named_directory(_directory(rng, sets, load))
    if unsharded(table).waiting_sets:
        waiting = sets._replace(sets=unsharded(table).waiting_sets)
        found |= named_directory(_directory(rng, waiting, load * rng.random()), WAITING)
    found |= {"hash_clock": np.int32(9)}
    for name in unsharded(table).table.spec.row_arrays:
        found[name] = rng.random(state[name].shape, np.float32)
    return state | {name: jax.device_put(x, state[name].sharding) for name, x in found.items()}


def _earlier(rng: np.random.Generator, table: Any, state: Any) -> tuple[dict[str, Any], int]:
    """A state from which batches may have led to another one, and how many of its keys have left since then."""
    sets = _sets(table)
    kept = entries_of(KeyDirectory(*(state[name] for name in KEYS)))
    kept = kept[rng.random(len(kept)) < 0.8]
    kept["score"][rng.random(len(kept)) < 0.2] += np.uint64(1)
    gone = entries_of(_directory(rng, sets, float(rng.choice([0, 0.5, 1]))))
    gone = gone[~np.isin(gone["slot"], kept["slot"])]
    found = named_directory(directory_with(np.concatenate([kept, gone]), sets, ""))
    for name in unsharded(table).table.spec.row_arrays:
        rows = np.array(state[name])
        rows[rng.random(len(rows)) < 0.2] += 1
        found[name] = rows
    after = {name: jax.device_put(x, state[name].sharding) for name, x in found.items()}
    return {**state, **after}, len(gone)


def _entries(state: Any, names: Any, sets: Sets) -> np.ndarray:
    """The keys in slots in which lookups find them."""
    directory = KeyDirectory(*(np.asarray(state[name]) for name in names))
    flat = [
        x.reshape(sets.sets, *x.shape[x.ndim - k :])
        for x, k in zip(directory, (2, 2, 1), strict=True)
    ]
    entries = entries_of(KeyDirectory(*flat))
    homes = sets.homes(entries["key"])
    assert (homes == entries["slot"] // sets.ways).any(axis=0).all(), "keys are in other sets"
    return np.sort(entries, order="key")


def _check_keys(
    table: Any, state: Any, before_table: Any, before: Any, names: Any, kept: set[int]
) -> None:
    """Of the keys that a table had before, it has those that are kept, with their scores, last batches and rows."""
    new = _entries(state, names, sets_of(state[names[2]])._replace(devices=_sets(table).devices))
    sets = sets_of(before[names[2]])._replace(devices=_sets(before_table).devices)
    old = _entries(before, names, sets)
    old = old[np.isin(old["key"], list(kept))]
    for field in "key", "score", "touched":
        np.testing.assert_array_equal(new[field], old[field])
    for name in unsharded(table).table.spec.row_arrays if names == KEYS else ():
        rows, own = np.asarray(state[name])[new["slot"]], np.asarray(before[name])[old["slot"]]
        np.testing.assert_array_equal(rows, own, err_msg=name)


def _staying(table: Any, state: Any, other: Any, names: Any) -> tuple[set[int], int]:
    """The keys that stay where a state moves to another table, and how many do not."""
    sets = sets_of(state[names[2]])._replace(devices=_sets(table).devices)
    entries = _entries(state, names, sets)[["key", "score", "touched"]].tolist()
    keys, target = {key: (score, touched) for key, score, touched in entries}, _sets(other)
    if names == KEYS:
        ages = {"now": int(state["hash_clock"]), "min_age": unsharded(other).min_age}
    else:
        ages, target = {}, target._replace(sets=unsharded(other).waiting_sets)
    kept = keys.keys() if target == sets else staying(keys, *target, **ages)
    return set(kept), len(keys) - len(kept)


def one(rng: np.random.Generator) -> str:
    """Moves a random table; what came of it."""
    table = _table(rng)
    same = rng.random() < 0.4
    other = table if same else _table(rng, unsharded(table))
    load = float(rng.choice([0, 0.3, 0.75, 0.9, 1]))
    state, way = _state(rng, table, load), str(rng.choice(WAYS))
    before = jax.device_get(state)
    if way in ("pieces", "grown"):  # all keys stay
        other = table
    elif way == "frozen":
        other = unsharded(table)
    names = (KEYS, WAITING) if unsharded(table).waiting_sets else (KEYS,)
    kept, lost = zip(*(_staying(table, before, other, own) for own in names), strict=True)
    strict = way == "changes" or unsharded(table).policy == "none"
    refused = lost[0] > 0 and strict
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MissingKeyWarning)
            after_table, after = _moved(rng, way, table, state, other, lost)
    except ValueError as error:
        text = str(error)
        assert "find no room" in text, text
        if way == "changes":  # the earlier dump may be what has no room
            assert _sets(table) != _sets(other), text
        else:
            assert refused and f"{lost[0]} of " in text, text
        assert re.search(r"expected a capacity of \d+", text), text
        outcome = "refused"
    else:
        assert not refused
        said = [one for one in caught if one.category is MissingKeyWarning]
        by_state = way in ("rows", "collection", "frozen")
        assert len(said) == (by_state and any(lost)), [str(one.message) for one in caught]
        outcome = "moved some" if any(lost) else "moved"
        for own, stay in zip(names, kept, strict=True):
            if own[0] in after or way != "frozen":
                _check_keys(after_table, after, table, before, own, stay)
        np.testing.assert_array_equal(after["hash_clock"], before["hash_clock"])
        if _sets(after_table) == _sets(table) and way != "frozen":
            for name in itertools.chain(*names):
                np.testing.assert_array_equal(after[name], before[name], err_msg=name)
            outcome = "same slots"
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
    return f"{outcome} by {way}"


def _moved(
    rng: np.random.Generator, way: str, table: Any, state: Any, other: Any, lost: tuple[int, ...]
) -> tuple[Any, dict[str, Any]]:
    """A table and its state with the same keys."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dump")
        if way == "dump":
            jax_tt.files.dump(
                table, state, path, rows_per_file=int(rng.integers(5, 300)), progress=False
            )
            start = other.init(jax.random.key(1))
            counts, found = jax_tt.files.load_dump(other, start, path, progress=False)
            assert counts[2:] == (*lost, 0)[:2]
            return other, found
        if way == "changes":
            earlier, gone = _earlier(rng, table, state)
            jax_tt.files.dump(table, earlier, path, progress=False)
            options = {"progress": False, "overflow": "error"}
            start = other.init(jax.random.key(1))
            _, start = jax_tt.files.load_dump(other, start, path, **options)
            later = Path(folder, "changes")
            jax_tt.files.dump(table, state, later, since=path, progress=False)
            counts, found = jax_tt.files.load_dump(other, start, later, **options)
            assert counts.evicted == gone
            return other, found
    if way == "rows":
        return other, of_rows(other, by_row(table, state))
    if way == "grown":
        return jax_tt.dynamic.grow_if_full(table, state, max_load=0.5)
    source, target = (
        jax_tt.Collection({"item": own}, {"item": jax_tt.Feature("item")}) for own in (table, other)
    )
    states = source.init(jax.random.key(0))
    states["item"] = {name: state[name] for name in states["item"]}
    if way == "pieces":
        arrays = jax_tt.checkpoint.save_args(source, states)
        return table, jax_tt.checkpoint.restore(source, states, arrays)["item"]
    if way == "frozen":
        served, arrays = source.frozen(states)
        names = unsharded(table).table.spec.row_arrays
        kept = {name: arrays["item"].get(name, state[name]) for name in state}
        own: Any = served.tables["item"]
        inner = dataclasses.replace(unsharded(table), table=own.table)
        assert names.keys() >= own.table.spec.row_arrays.keys()
        return inner, kept
    return other, target.joined(source.separated(states))["item"]
