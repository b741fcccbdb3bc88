"""One process of random operations on hash tables that are sharded over devices, against Python dicts.

    python -m tests.kinds.sharded.model_run PROCESS COUNT PORT DEVICES METHOD OPERATIONS SEED POLICY... OUT.npz

All processes together have ``DEVICES`` devices. Writes the number of operations with the table of every policy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from jax_tt._base.progress import Progress
from tests.kinds.hashed.hash_run import HashRun, device_numbers
from tests.kinds.hashed.hash_soak import operated


def main(
    process: int, count: int, port: str, given: list[str], policies: list[str], out: Path
) -> None:
    devices, method, operations, seed = int(given[0]), given[1], int(given[2]), int(given[3])
    # Most of the time is that of the compiler.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_num_cpu_devices", devices // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    counts = {}
    for policy in policies:
        folder = out.parent / policy  # all processes see it
        folder.mkdir(exist_ok=True)
        options = {"devices": devices, "others": device_numbers()}
        made = HashRun(policy, method, folder, seed, **options)
        counts[policy] = operated(made, -(-operations // len(policies)), Progress(shown=False))
    np.savez(out, **counts)


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        sys.argv[4:8],
        sys.argv[8:-1],
        Path(sys.argv[-1]),
    )
