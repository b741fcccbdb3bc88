"""What hash tables do on four devices, which belong to one or several processes.

They evict and remove keys, grow, and are dumped and loaded on a mesh with explicit axes.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt._jax.on_host import on_all, on_host

BATCH = 60


def _table(mesh: Mesh, capacity: int = 128, **options: Any) -> Any:
    plain = _plain(capacity, **options)
    return jax_tt.shard_tables({"item": plain}, mesh, "model")["item"]


def _plain(capacity: int, **options: Any) -> Any:
    rule = jax_tt.optimizers.Adagrad(0.1)
    options = {"policy": "lfu", "safe_check": "ignore", "max_capacity": 1024} | options
    return jax_tt.hash_table(capacity, 4, optimizer=rule, name="item", **options)


def _start(table: Any, seed: int) -> Any:
    explicit = AxisType.Explicit in table.mesh.axis_types
    with jax.set_mesh(table.mesh) if explicit else contextlib.nullcontext():
        return jax.jit(table.init)(jax.random.key(seed))


def _sorted(entries: np.ndarray) -> dict[str, np.ndarray]:
    entries = entries[np.argsort(entries["key"])]
    return {name: entries[name] for name in ("key", "score", "touched")}


def _loaded(table: Any, state: Any, *paths: Path, **options: Any) -> Any:
    for path in paths:
        _, state = jax_tt.files.load_dump(table, state, path, progress=False, **options)
    return state


def _restored(table: Any, state: Any, other: Any) -> dict[str, np.ndarray]:
    """The keys and rows of a checkpoint on other devices."""
    before, after = (
        jax_tt.Collection({"item": own}, {"item": jax_tt.Feature("item")}) for own in (table, other)
    )
    with jax.set_mesh(table.mesh):
        start = jax.jit(before.init)(jax.random.key(0))
        states = start | {"item": {name: state[name] for name in start["item"]}}
        # As orbax writes and reads them.
        saved = jax.tree.map(on_host, jax_tt.checkpoint.save_args(before, states))
    with jax.set_mesh(other.mesh):
        start = jax.jit(after.init)(jax.random.key(1))
        like = jax_tt.checkpoint.target(after, start)
        arrays = jax.tree.map(lambda x, own: on_all(x, own.sharding), saved, like)
        item = jax_tt.checkpoint.restore(after, start, arrays)["item"]
        entries = np.sort(jax_tt.dynamic.keys_of(after.tables["item"], item), order="key")
    return {**_sorted(entries), "rows": on_host(item["embedding"])[entries["slot"]]}


def _by_key(table: Any, state: Any) -> dict[str, np.ndarray]:
    """The arrays of a table of one device."""
    entries = jax_tt.dynamic.keys_of(table, state)
    entries = entries[np.argsort(entries["key"])]
    rows = {name: np.asarray(state[name])[entries["slot"]] for name in table.table.spec.row_arrays}
    return rows | _sorted(entries)


def results(process: int, folder: Path) -> dict[str, Any]:
    """What is seen of the keys; dumps are written to ``folder``, which all processes see."""
    types = (AxisType.Explicit,)
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=types)
    over_devices = NamedSharding(mesh, P("model"))
    found: dict[str, Any] = {}

    def batch(first: int) -> Any:
        digits = jax_tt.dynamic.split_keys(np.arange(first, first + BATCH) << 33).digits
        place = jax.make_array_from_callback
        return jax_tt.SplitIds(place(digits.shape, over_devices, lambda index: digits[index]))

    def insert(table: Any, state: Any, first: int) -> Any:
        step = jax.jit(partial(jax_tt.dynamic.insert, table, return_evicted=True))
        inserted, state = step(state, batch(first))
        for name, values in inserted.evicted._asdict().items():
            if name != "arrays":
                found[f"evicted {first} {name}"] = np.asarray(values)
        return state

    table = _table(mesh)
    state = _start(table, 0)
    for first in 0, 40, 120:
        state = insert(table, state, first)
    written = [jax_tt.files.dump(table, state, folder / "0", rows_per_file=16, progress=False)]
    two = Mesh(mesh.devices[[0, -1]], ("model",), axis_types=types)
    restored = _restored(table, state, _table(two))
    found |= {f"restored {name}": x for name, x in restored.items()}

    gone, state = jax_tt.dynamic.remove(table, state, where=lambda view: view.age >= 2, size=16)
    found["removed"] = np.asarray(gone.keys)
    gone, state = jax_tt.dynamic.remove(table, state, batch(120), size=8)
    found["removed by name"] = np.asarray(gone.touched)
    larger, state = jax_tt.dynamic.grow_if_full(table, state, max_load=0.3)
    state = insert(larger, state, 0)
    found |= jax_tt.dynamic.statistics(larger, state)
    found |= _sorted(jax_tt.dynamic.keys_of(larger, state))
    written.append(
        jax_tt.files.dump(larger, state, folder / "1", since=folder / "0", progress=False)
    )
    found["written"] = np.array(written)

    paths = folder / "0", folder / "1"
    for name, own in ("same", larger), ("other", _table(two, 384, ways=4, max_capacity=1536)):
        state = _loaded(own, _start(own, 1), *paths)
        for field, values in _sorted(jax_tt.dynamic.keys_of(own, state)).items():
            found[f"{name} {field}"] = values
        jax_tt.files.dump(own, state, folder / name, progress=False)
        alone = _plain(1024)  # of this process
        state = _loaded(alone, alone.init(jax.random.key(2)), folder / name)
        found |= {f"{name} alone {k}": x for k, x in _by_key(alone, state).items()}
        mine = folder / f"{name} of {process}"
        jax_tt.files.dump(alone, state, mine, progress=False)
        again = _loaded(alone, alone.init(jax.random.key(3)), mine)
        np.testing.assert_equal(_by_key(alone, again), _by_key(alone, state))

    tiny = _table(mesh, 64)
    state = _loaded(tiny, _start(tiny, 1), paths[0])
    kept = _sorted(jax_tt.dynamic.keys_of(tiny, state))
    found |= {f"tiny {field}": values for field, values in kept.items()}
    errors = []
    for own, at in (tiny, paths[0]), (larger, folder / ("none" if process else "0")):
        try:
            _loaded(own, _start(own, 1), at, overflow="error")
        except (ValueError, jax_tt.FileError) as error:
            errors.append(str(error))
    found["errors"] = np.array(errors)
    return found
