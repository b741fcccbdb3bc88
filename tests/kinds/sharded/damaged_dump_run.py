"""One of two processes whose dumps of a sharded hash table meet full disks, damaged files and a process that is killed.

    python -m tests.kinds.sharded.damaged_dump_run PROCESS COUNT PORT FOLDER OUT.npz

The second process is killed in the last dump, after both have written what they have seen to ``OUT.npz``.
"""

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


def main(process: int, count: int, port: str, folder: Path, out: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        process,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )
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
    np.savez(out, messages=np.array(messages), files=np.array(files), keys=keys)
    multihost_utils.sync_global_devices("written")
    if process == 1:
        sys.addaudithook(partial(_killed_at_second, []))
    try:
        dump(last)
    finally:
        os._exit(3)  # not after a peer that has ended


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
