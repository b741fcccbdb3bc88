"""Sharded tables on 8 devices: ``python -m tests.lookup.table_shards_run PROCESS COUNT PORT OUT.npz``.

One of several processes; it writes an empty file.
"""

import sys

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

DEVICES = 8


def main(process: int, count: int, port: str, out: str) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process)

    from tests.lookup.shard_ways import check_ways
    from tests.lookup.table_shards import check_memory, check_steps, mesh_of

    check_steps(mesh_of((2, 4), AxisType.Auto), "rowwise", P("model", None), steps=2)
    check_memory(mesh_of((2, 4), AxisType.Explicit), "gradients", P("model", None), steps=2)
    check_ways(mesh_of((2, 4), AxisType.Auto), "auto")
    np.savez(out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
