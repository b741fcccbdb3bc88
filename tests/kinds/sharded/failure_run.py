"""One process of a training that may lose one.

    python -m tests.kinds.sharded.failure_run PROCESS COUNT PORT FOLDER DEATH OUT.npz

Goes on from the last checkpoint in ``FOLDER``, writes one every few steps, and the final rows to ``OUT.npz``. ``DEATH``
is ``PROCESS:STEP`` of a process that is killed, as by the system, before this step; with ``none``, all of them live
until they have done what `damaged_dump_run` does.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.kinds.sharded import damaged_dump_run

STEPS, EVERY, BATCH, ROWS = 6, 2, 12, 203


def _collection(mesh: Any) -> jax_tt.Collection:
    tables = {"item": jax_tt.dense_table(ROWS, 8, optimizer=jax_tt.optimizers.Adam(0.05))}
    sharded = jax_tt.shard_tables(tables, mesh, "model", jax_tt.Placement.hashed())
    return jax_tt.Collection(sharded, {"item": jax_tt.Feature("item")})


def final_rows(process: int, count: int, folder: Path, death: str = "none") -> dict[str, Any]:
    """What the tables have after all steps, on two devices or on those of several processes."""
    devices = jax.devices() if count > 1 else jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("model",), axis_types=(AxisType.Auto,))
    collection = _collection(mesh)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        def loss(trained: Any) -> Any:
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return sum(jnp.sum(jnp.sin(3 * array)) for array in rows.values())

        gradients = jax.grad(loss)(collection.trained(state))
        return collection.overwritten(state, gradients)[0]

    divided = NamedSharding(mesh, P("model"))
    share = slice(process * BATCH // count, (process + 1) * BATCH // count)
    with ocp.StandardCheckpointer() as checkpointer:
        done = max(
            [int(found.name) for found in folder.glob("[0-9]*") if found.name.isdigit()], default=0
        )
        if done:
            target = jax_tt.checkpoint.target(collection, state)
            arrays = checkpointer.restore(folder / str(done), target, strict=False)
            state = jax_tt.checkpoint.restore(collection, state, arrays)
        else:
            state = jax.jit(collection.init)(jax.random.key(0))
        for k in range(done, STEPS):
            if death == f"{process}:{k}":
                os.kill(os.getpid(), signal.SIGKILL)
            ids = np.random.default_rng(k).integers(0, ROWS, (BATCH, 5)).astype(np.int32)
            batch = jax.make_array_from_process_local_data(divided, ids[share])
            state = step(state, {"item": batch})
            jax.block_until_ready(state)
            if (k + 1) % EVERY == 0 and count != 1:
                checkpointer.save(
                    folder / str(k + 1), jax_tt.checkpoint.save_args(collection, state)
                )
                checkpointer.wait_until_finished()

    def whole(state: Any) -> Any:
        everywhere = NamedSharding(mesh, P())
        return jax.lax.with_sharding_constraint(collection.separated(state), everywhere)

    found = jax.device_get(jax.jit(whole)(state))
    return {f"{table} {name}": x for table, own in found.items() for name, x in own.items()}


def main(process: int, count: int, port: str, folder: Path, death: str, path: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        count,
        process,
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )
    rows = final_rows(process, count, folder, death)
    damaged_dump_run.run(process, folder, path, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
