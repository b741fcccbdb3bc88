"""One of several processes that use sharded tables together, on as many devices as the tests have.

    python -m tests.kinds.sharded.group_run PROCESS COUNT PORT FOLDER OUT.npz

Does one thing after another, since every start takes seconds. Dumps are written to ``FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_tt._base.progress import Progress
from tests.kinds.hashed.hash_run import HashRun, device_numbers
from tests.kinds.hashed.hash_soak import operated
from tests.kinds.sharded import collection_run, keys_run

DEVICES, OPERATIONS = 4, 3000


def operations(folder: Path) -> int:
    """Random operations on a hash table, compared with dicts."""
    folder.mkdir(exist_ok=True)  # all processes see it
    made = HashRun("lfu", "auto", folder, devices=DEVICES, others=device_numbers())
    return operated(made, OPERATIONS, Progress(shown=False))


def named(what: str, results: dict[str, Any]) -> dict[str, Any]:
    return {f"{what}: {name}": array for name, array in results.items()}


def main(process: int, count: int, port: str, folder: Path, path: str) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    np.savez(
        path,
        **named("collection", collection_run.results(process, count)),
        **named("keys", keys_run.results(process, folder)),
        operations=operations(folder / "operations"),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
