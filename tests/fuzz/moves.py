"""Dumps, loads and moves of hash tables over devices, capacities and loads: all keys are there, or it is an error."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import jax_tt
from jax_tt import Placement
from jax_tt._directories.hash_directory import KEYS, WAITING, KeyDirectory, named_directory
from jax_tt._directories.placing import ENTRY, Sets, _slots, directory_with, entries_of
from jax_tt._directories.relocate import sets_of
from jax_tt._table.checkpoint import by_row, of_rows, unsharded
from jax_tt._table.wrapper import is_sharded
from jax_tt.tables import ShardedTable

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
            policy=str(rng.choice(["lru", "lfu", "none"])),
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
    entries["slot"] = _slots(entries["key"], np.full(count, -1), sets)
    entries["score"] = rng.integers(0, 2**40, count, np.uint64)
    entries["touched"] = rng.integers(1, 9, count)
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


def _check_same_keys(table: Any, state: Any, expected_table: Any, expected: Any) -> None:
    new, old = (
        _entries(s, KEYS, _sets(t)) for t, s in ((table, state), (expected_table, expected))
    )
    assert len(new) == len(old), f"{len(new)} of {len(old)} keys are left"
    for field in "key", "score", "touched":
        np.testing.assert_array_equal(new[field], old[field])
    for name in unsharded(table).table.spec.row_arrays:
        rows, before = np.asarray(state[name])[new["slot"]], np.asarray(expected[name])[old["slot"]]
        np.testing.assert_array_equal(rows, before, err_msg=name)
    if unsharded(table).waiting_sets:
        fields = [
            _entries(s, WAITING, sets_of(s[WAITING[2]])._replace(devices=_sets(t).devices))[
                ["key", "score", "touched"]
            ]
            for t, s in ((table, state), (expected_table, expected))
        ]
        np.testing.assert_array_equal(fields[0], fields[1])
    np.testing.assert_array_equal(state["hash_clock"], expected["hash_clock"])


def one(rng: np.random.Generator) -> str:
    """Moves a random table; what came of it."""
    table = _table(rng)
    same = rng.random() < 0.4
    other = table if same else _table(rng, unsharded(table))
    load = float(rng.choice([0, 0.3, 0.75, 0.9, 1]))
    state, way = _state(rng, table, load), str(rng.choice(WAYS))
    before = jax.device_get(state)
    try:
        found = _moved(rng, way, table, state, other)
    except ValueError as error:
        text = str(error)
        assert "find no room" in text, text
        assert _sets(table) != _sets(other) or way == "frozen", text
        assert re.search(r"expected a larger capacity, such as \d+", text), text
        outcome = "refused"
    else:
        after_table, after = found
        _check_same_keys(after_table, after, table, before)
        outcome = "moved"
        if _sets(after_table) == _sets(table) and way != "frozen":
            for name in (*KEYS, *(WAITING if unsharded(table).waiting_sets else ())):
                np.testing.assert_array_equal(after[name], before[name], err_msg=name)
            outcome = "same slots"
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
    return f"{outcome} by {way}"


def _moved(
    rng: np.random.Generator, way: str, table: Any, state: Any, other: Any
) -> tuple[Any, dict[str, Any]]:
    """A table and its state with the same keys."""
    start = other.init(jax.random.key(1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dump")
        if way == "dump":
            jax_tt.files.dump(
                table, state, path, rows_per_file=int(rng.integers(5, 300)), progress=False
            )
            counts, found = jax_tt.files.load_dump(other, start, path, progress=False)
            assert counts.evicted == 0
            return other, found
        if way == "changes":
            earlier, gone = _earlier(rng, table, state)
            jax_tt.files.dump(table, earlier, path, progress=False)
            _, start = jax_tt.files.load_dump(other, start, path, progress=False)
            later = Path(folder, "changes")
            jax_tt.files.dump(table, state, later, since=path, progress=False)
            counts, found = jax_tt.files.load_dump(other, start, later, progress=False)
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
