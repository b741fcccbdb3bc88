"""One process of a run with sharded tables: ``python -m tests.kinds.sharded.sharded_run PROCESS COUNT PORT OUT.npz``.

All processes together have four devices. Writes the rows of all tables after a few steps.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt

DEVICES, STEPS, BATCH = 4, 4, 16
FEATURES = {
    "clicked": jax_tt.Feature("item"),
    "shown": jax_tt.Feature("item", combiner="mean"),
    "user": jax_tt.Feature("user", combiner=None),
    "big": jax_tt.Feature("big"),
    "seen": jax_tt.Feature("long"),
}
LENGTHS = {"clicked": 5, "shown": 3, "user": 1, "big": 2, "seen": 12}


def main(process: int, count: int, port: str, path: str) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rule = jax_tt.optimizers.Adam(0.05)
    tables = {
        "item": jax_tt.dense_table(300, 8, optimizer=rule),
        "user": jax_tt.dense_table(100, 4, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1)),
        "big": jax_tt.tt_table(10_000, 8, tt_ranks=4, optimizer=rule),
        "long": jax_tt.dense_table(100, 4, optimizer=jax_tt.optimizers.SGD(0.1)),
    }
    placement = {"item": jax_tt.Placement.pages([(0, 1), 1, 0], 100)}
    sharded = jax_tt.shard_tables(tables, mesh, ("data", "model"), jax_tt.Placement.hashed())
    sharded |= jax_tt.shard_tables({"item": tables["item"]}, mesh, "model", placement)
    # Tables that are divided over other axes travel on their own: these are sums alone.
    sums = jax_tt.planning.Exchange(pooled="sums")
    sharded |= jax_tt.shard_tables(
        {"long": tables["long"]}, mesh, ("model", "data"), jax_tt.Placement.hashed(), sums
    )
    collection = jax_tt.Collection(sharded, FEATURES)
    everywhere = NamedSharding(mesh, P())
    over_devices = NamedSharding(mesh, P(("data", "model")))

    def whole(state: Any) -> Any:
        return jax.lax.with_sharding_constraint(collection.separated(state), everywhere)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        def loss(trained: Any) -> Any:
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return sum(jnp.sum(jnp.sin(array)) for array in rows.values())

        value, gradients = jax.value_and_grad(loss)(collection.trained(state))
        return value, collection.overwritten(state, gradients)[0]

    state = jax.jit(collection.init)(jax.random.key(0))
    rng = np.random.default_rng(0)
    share = slice(process * BATCH // count, (process + 1) * BATCH // count)
    losses = []
    for _ in range(STEPS):
        ids = {name: rng.integers(0, 100, (BATCH, length)) for name, length in LENGTHS.items()}
        batch = {
            name: jax.make_array_from_process_local_data(over_devices, own[share].astype(np.int32))
            for name, own in ids.items()
        }
        value, state = step(state, batch)
        losses.append(float(value))
    results = {"losses": np.array(losses)}
    for table, arrays in jax.jit(whole)(state).items():
        results |= {f"{table} {name}": np.asarray(array) for name, array in arrays.items()}
    np.savez(path, **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
