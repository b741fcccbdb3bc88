"""One process with limited memory: ``python -m tests.kinds.sharded.memory_run PROCESS COUNT PORT OUT.npz``.

Before there is a table, the limit is set to what the process has reserved by then, half of the table, and `SPARE` bytes
for messages, compiled programs and batches. Then a few steps are trained. Writes the losses.
"""

from __future__ import annotations

import functools
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt

# More than 2**28 bytes, up to which every device initialises the whole table.
ROWS, WIDTH, SPARE, BATCH, STEPS = 3 * 2**17, 256, 2**27, 64, 2
TABLE_BYTES = ROWS * WIDTH * 4


def _data_bytes() -> int:
    """What `RLIMIT_DATA` limits, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def _trained(rows: int, mesh: Any, share: slice) -> np.ndarray:
    """The losses of some steps of a table."""
    rule = jax_tt.optimizers.RowWiseAdagrad(0.1)
    dense = jax_tt.dense_table(rows, WIDTH, optimizer=rule)
    table = jax_tt.tables.ShardedTable(dense, mesh, "model", jax_tt.Placement.contiguous())

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, ids: Any) -> Any:
        def loss(trained: Any) -> Any:
            found, _ = jax_tt.lookup(table, {**state, **trained}, ids)
            return jnp.mean((found - 1) ** 2)

        trained = {name: state[name] for name in table.spec.trained_names}
        value, new = jax.value_and_grad(loss)(trained)
        return {**state, **new}, value

    state = jax.jit(table.init)(jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, rows, BATCH).astype(np.int32)
    divided = NamedSharding(mesh, P("model"))
    losses = []
    for _ in range(STEPS):
        batch = jax.make_array_from_process_local_data(divided, ids[share])
        state, value = step(state, batch)
        losses.append(float(value))
    return np.array(losses)


def main(process: int, count: int, port: str, path: str) -> None:
    # Without fusion, drawing the rows takes most of the time.
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_num_cpu_devices", 1)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    mesh = jax.make_mesh((count,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    share = slice(process * BATCH // count, (process + 1) * BATCH // count)
    _trained(1000, mesh, share)  # makes threads, connections and caches of the compiler
    limit = _data_bytes() + TABLE_BYTES // 2 + SPARE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    np.savez(path, losses=_trained(ROWS, mesh, share))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
