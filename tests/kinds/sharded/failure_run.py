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
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from tests.kinds.sharded import damaged_dump_run

STEPS, EVERY, BATCH, ROWS = 6, 2, 12, 203


def _collection(mesh: Any) -> jax_tt.Collection:
    tables = {
        "item": jax_tt.dense_table(ROWS, 8, optimizer=jax_tt.optimizers.Adam(0.05)),
        "ad": jax_tt.dense_table(ROWS, 4),  # which optax steps
    }
    sharded = jax_tt.shard_tables(tables, mesh, "model", jax_tt.Placement.hashed())
    return jax_tt.Collection(sharded, {name: jax_tt.Feature(name) for name in tables})


def final_rows(process: int, count: int, folder: Path, death: str = "none") -> dict[str, Any]:
    """What the tables have after all steps, on two devices or on those of several processes."""
    devices = jax.devices() if count > 1 else jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("model",), axis_types=(AxisType.Auto,))
    collection, tx = _collection(mesh), optax.adam(0.05)

    @jax.jit
    def init(key: Any) -> Any:
        tables = collection.init(key)
        return {"tables": tables, "opt": tx.init({"ad": collection.trained(tables)["ad"]})}

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        tables = state["tables"]

        def loss(trained: Any) -> Any:
            arrays = collection.replaced(tables, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return sum(jnp.sum(jnp.sin(3 * array)) for array in rows.values())

        gradients = jax.grad(loss)(collection.trained(tables))
        tables, others = collection.overwritten(tables, gradients)
        updates, opt = tx.update(others, state["opt"])
        after = optax.apply_updates({"ad": collection.trained(tables)["ad"]}, updates)
        return {"tables": collection.replaced(tables, after), "opt": opt}

    divided = NamedSharding(mesh, P("model"))
    share = slice(process * BATCH // count, (process + 1) * BATCH // count)
    with ocp.StandardCheckpointer() as checkpointer:
        done = max(
            [int(found.name) for found in folder.glob("[0-9]*") if found.name.isdigit()], default=0
        )
        state = init(jax.random.key(0))
        if done:
            target = jax_tt.checkpoint.target(collection, state)
            arrays = checkpointer.restore(folder / str(done), target, strict=False)
            state = jax_tt.checkpoint.restore(collection, state, arrays)
        for k in range(done, STEPS):
            if death == f"{process}:{k}":
                os.kill(os.getpid(), signal.SIGKILL)
            ids = np.random.default_rng(k).integers(0, ROWS, (BATCH, 5)).astype(np.int32)
            batch = jax.make_array_from_process_local_data(divided, ids[share])
            state = step(state, {"item": batch, "ad": batch})
            jax.block_until_ready(state)
            if (k + 1) % EVERY == 0 and count != 1:
                checkpointer.save(
                    folder / str(k + 1), jax_tt.checkpoint.save_args(collection, state)
                )
                checkpointer.wait_until_finished()

    def whole(state: Any) -> Any:
        everywhere = NamedSharding(mesh, P())
        return jax.lax.with_sharding_constraint(collection.separated(state["tables"]), everywhere)

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
