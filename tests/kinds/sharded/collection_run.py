"""A few steps of a collection whose tables are sharded over four devices, which belong to one or several processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt

STEPS, BATCH = 3, 16
CACHE = jax_tt.RowCache(16, ways=4, refresh_every=2, write_back=None)
FEATURES = {
    "clicked": jax_tt.Feature("item"),
    "shown": jax_tt.Feature("item", combiner="mean"),
    "user": jax_tt.Feature("user", combiner=None),
    "big": jax_tt.Feature("big"),
    "seen": jax_tt.Feature("long"),
}
LENGTHS = {"clicked": 5, "shown": 3, "user": 1, "big": 2, "seen": 12}


def results(process: int, count: int) -> dict[str, Any]:
    """The losses and the rows of all tables."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rule = jax_tt.optimizers.Adam(0.05)
    tables = {
        "item": jax_tt.dense_table(300, 8, optimizer=rule),
        "user": jax_tt.dense_table(100, 4, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1)),
        # Its batches are divided over the devices, and the gradients of cores added.
        "big": jax_tt.tt_table(10_000, 8, tt_ranks=4, optimizer=rule, cache=CACHE),
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
        state, _ = collection.overwritten(state, gradients)
        return value, collection.maintain(state)

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
    found = {"losses": np.array(losses)}
    for table, arrays in jax.jit(whole)(state).items():
        found |= {f"{table} {name}": np.asarray(array) for name, array in arrays.items()}
    return found
