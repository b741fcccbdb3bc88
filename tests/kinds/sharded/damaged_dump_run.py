"""Dumps of a hash table on two processes: full disks, damaged files, and a process that is killed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import jax_tt


@contextlib.contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """A disk that is full after so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _killed_at_second(seen: list[str], event: str, arguments: Any) -> None:
    if event == "os.rename" and ".jax_tt_dump" in str(arguments[0]):
        seen.append(event)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def run(process: int, folder: Path, out: str, results: dict[str, Any]) -> None:
    """Adds what it sees to ``results``, writes them to ``out``, and ends both processes: the second one is killed."""
    count = jax.process_count()
    mesh = jax.make_mesh((count,), ("model",), axis_types=(AxisType.Auto,))
    rule = jax_tt.optimizers.Adagrad(0.1)
    plain = jax_tt.hash_table(64, 4, optimizer=rule, safe_check="ignore", name="item")
    table: Any = jax_tt.shard_tables({"item": plain}, mesh, "model")["item"]
    start = jax.jit(table.init)(jax.random.key(0))
    insert = jax.jit(partial(jax_tt.dynamic.insert, table))
    _, state = insert(start, jax_tt.dynamic.split_keys(np.arange(24)))
    path, messages = folder / "dump", []

    def dump(state: Any) -> None:
        options = {"rows_per_file": 8, "progress": False, "overwrite": True}
        jax_tt.files.dump(table, state, path, **options)

    def load() -> Any:
        return jax_tt.files.load_dump(table, start, path, progress=False)[1]

    def attempt(function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
            messages.append("no error")
        except jax_tt.FileError as error:
            messages.append(str(error))

    def check() -> None:
        found = load()
        for name, array in state.items():
            pairs = zip(found[name].addressable_shards, array.addressable_shards, strict=True)
            for mine, expected in pairs:
                np.testing.assert_array_equal(mine.data, expected.data, err_msg=name)

    def changed(number: int) -> Any:
        # Every time in another way: what a dump that failed has left is kept where it is the same.
        return insert(state, jax_tt.dynamic.split_keys(np.arange(24) + 6 * number))[1]

    dump(state)
    check()
    for full in range(count):
        with _largest_file(100) if process == full else contextlib.nullcontext():
            attempt(dump, changed(full))
        check()
    files = sorted(file.name for file in path.iterdir())
    for name in files:
        whole = (path / name).read_bytes()
        multihost_utils.sync_global_devices(f"before {name}")
        if process == 0:
            damaged = bytearray(whole)
            damaged[len(whole) * 3 // 4] ^= 1
            (path / name).write_bytes(damaged)
        multihost_utils.sync_global_devices(f"changed {name}")
        attempt(load)
        multihost_utils.sync_global_devices(f"read {name}")
        if process == 0:
            (path / name).write_bytes(whole)
    multihost_utils.sync_global_devices("whole again")
    check()
    keys, last = np.sort(jax_tt.dynamic.keys_of(table, state)["key"]), changed(count)
    np.savez(out, messages=np.array(messages), files=np.array(files), keys=keys, **results)
    multihost_utils.sync_global_devices("written")
    if process == 1:
        sys.addaudithook(partial(_killed_at_second, []))
    try:
        dump(last)
    finally:
        os._exit(3)  # not after a peer that has ended
