"""Sharded tables on 8 devices: ``python -m tests.lookup.table_shards_run DATA MODEL``.

Or in one of several processes: ``... PROCESS COUNT PORT OUT.npz``, which writes an empty file.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

DEVICES = 8


def main() -> None:
    processes = len(sys.argv) > 3
    if processes:
        process, count, port, out = sys.argv[1:]
        jax.config.update("jax_num_cpu_devices", DEVICES // int(count))
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(process))
        shape = (2, 4)
    else:
        jax.config.update("jax_num_cpu_devices", DEVICES)
        shape = (int(sys.argv[1]), int(sys.argv[2]))

    from tests.lookup.table_shards import RULES, check_memory, check_steps, mesh_of

    spec = P("data", None) if shape[1] == 1 else P("model", None)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for rule in RULES:
            check_steps(mesh_of(shape, kind), rule, spec)
            check_memory(mesh_of(shape, kind), rule, spec)
    if processes:
        np.savez(out)


if __name__ == "__main__":
    main()
