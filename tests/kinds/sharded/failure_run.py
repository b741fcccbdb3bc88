"""One process of a training that may lose one.

    python -m tests.kinds.sharded.failure_run PROCESS COUNT PORT FOLDER DEATH OUT.npz

Goes on from the last checkpoint in ``FOLDER``, writes one every few steps, and the final rows to ``OUT.npz``. ``DEATH``
is ``PROCESS:STEP`` of a process that is killed, as by the system, before this step; ``none`` if all of them live.
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt

STEPS, EVERY, BATCH, ROWS = 12, 3, 8, 203


def _collection(mesh: Any) -> jax_tt.Collection:
    rule = jax_tt.optimizers.Adam(0.05)
    tables = {
        "item": jax_tt.dense_table(ROWS, 8, optimizer=rule),
        "user": jax_tt.dense_table(50, 4, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1)),
    }
    sharded = jax_tt.shard_tables(tables, mesh, "model", {"user": jax_tt.Placement.hashed()})
    return jax_tt.Collection(sharded, {name: jax_tt.Feature(name) for name in tables})


def main(process: int, count: int, port: str, folder: Path, death: str, path: str) -> None:
    # As many devices as the training that goes on has, so that sums have the same order.
    jax.config.update("jax_num_cpu_devices", 1 if count > 1 else 2)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            count,
            process,
            heartbeat_timeout_seconds=10,
            shutdown_timeout_seconds=10,
        )
    mesh = jax.make_mesh(
        (jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,)
    )
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
            target = jax_tt.checkpoint.target(collection)
            arrays = checkpointer.restore(folder / str(done), target, strict=False)
            state = jax_tt.checkpoint.restore(collection, arrays)
        else:
            state = jax.jit(collection.init)(jax.random.key(0))
        for k in range(done, STEPS):
            if death == f"{process}:{k}":
                os.kill(os.getpid(), signal.SIGKILL)
            rng = np.random.default_rng(k)
            ids = {
                "item": rng.integers(0, ROWS, (BATCH, 5)),
                "user": rng.integers(0, 50, (BATCH, 2)),
            }
            batch = {
                name: jax.make_array_from_process_local_data(divided, own[share].astype(np.int32))
                for name, own in ids.items()
            }
            state = step(state, batch)
            jax.block_until_ready(state)
            print("step", k, flush=True)
            if (k + 1) % EVERY == 0 and count != 1:
                checkpointer.save(
                    folder / str(k + 1), jax_tt.checkpoint.save_args(collection, state)
                )
                checkpointer.wait_until_finished()

    def whole(state: Any) -> Any:
        everywhere = NamedSharding(mesh, P())
        return jax.lax.with_sharding_constraint(collection.separated(state), everywhere)

    found = jax.device_get(jax.jit(whole)(state))
    results = {f"{table} {name}": x for table, own in found.items() for name, x in own.items()}
    np.savez(path, **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
