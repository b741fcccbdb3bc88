"""Fifty steps of divided tables of every mode.

``python -m tests.sharded_modes_run PROCESS COUNT PORT DEVICES OUT.npz`` is one process. All of them together have
``DEVICES`` devices, 0 for tables that are not divided. Writes the rows of all tables and their optimizer state, those
of hash tables in the order of their keys.
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
from jax_tt import Exchange, Placement

STEPS, BATCH, LENGTH, ROWS, WIDTH = 50, 16, 4, 60, 8
RULES = {
    "sgd": jax_tt.optimizers.SGD(0.05),
    "adagrad": jax_tt.optimizers.RowWiseAdagrad(0.05),
    "adam": jax_tt.optimizers.Adam(0.01),
}
ELEMENTWISE = RULES | {"adagrad": jax_tt.optimizers.Adagrad(0.05)}
# The gradients of these are small powers of two, whose sums are exact in any order, also in 16 bits.
EXACT = ("narrow", "quantized")


def _tables() -> tuple[dict[str, Any], dict[str, Placement], dict[str, Exchange]]:
    """The tables by mode and rule, with their placements and exchanges."""
    tables: dict[str, Any] = {}
    placements: dict[str, Placement] = {}
    exchanges: dict[str, Exchange] = {}
    for name, rule in RULES.items():
        dense = jax_tt.dense_table(ROWS, WIDTH, optimizer=rule)
        update = jax_tt.Update(rule, stochastic_rounding=False)
        tables |= {
            f"columns {name}": jax_tt.dense_table(ROWS, WIDTH, optimizer=ELEMENTWISE[name]),
            f"narrow {name}": dense,
            f"expected {name}": dense,
            f"quantized {name}": jax_tt.QuantizedTable(ROWS, WIDTH, 8, update),
            f"hash {name}": jax_tt.hash_table(WIDTH, 1024, optimizer=rule, safe_check="error"),
        }
        placements[f"columns {name}"] = Placement.columns(2)
        placements[f"quantized {name}"] = Placement.hashed()
        exchanges[f"narrow {name}"] = Exchange(dtype="bfloat16")
        exchanges[f"expected {name}"] = Exchange(expected_unique=0.3)
    return tables, placements, exchanges


def _batches(tables: dict[str, Any]) -> Any:
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        ids = rng.integers(0, ROWS, (BATCH, LENGTH))
        # The first words of many keys, and the last words of others, are the same.
        keys = np.where(ids % 3 == 0, ids << 32, ids * 0x9E3779B97F4A7 + 5)
        words = jax_tt.split_keys(keys).digits
        yield {name: words if tables[name].takes_keys else ids.astype(np.int32) for name in tables}


def main(process: int, count: int, port: str, devices: int, path: str) -> None:
    jax.config.update("jax_num_cpu_devices", max(devices, 1) // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    tables, placements, exchanges = _tables()
    mesh = jax.make_mesh((max(devices, 1),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    own = jax_tt.shard_tables(tables, mesh, "model", placements, exchanges) if devices else tables
    collection = jax_tt.Collection(own, {name: jax_tt.Feature(name) for name in tables})
    factors = jnp.array([1, -0.5, 2, 0.25])[jnp.arange(BATCH) % 4, None]

    @jax.jit
    def step(state: Any, arrays: Any) -> Any:
        batch = {
            name: jax_tt.SplitIds(array) if tables[name].takes_keys else array
            for name, array in arrays.items()
        }
        state, _ = jax_tt.insert_collection_keys(collection, state, batch)

        def loss(trained: Any) -> Any:
            before = collection.replaced(state, trained)
            rows, _ = jax_tt.embed_collection(collection, before, batch)
            return sum(
                jnp.sum(factors * array if name.startswith(EXACT) else jnp.sin(array))
                for name, array in rows.items()
            )

        value, gradients = jax.value_and_grad(loss)(collection.trained(state))
        return value, collection.overwritten(state, gradients)[0]

    state = jax.jit(collection.init)(jax.random.key(0))
    over_devices, everywhere = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())
    share = slice(process * BATCH // count, (process + 1) * BATCH // count)
    for arrays in _batches(tables):
        batch = {
            name: jax.make_array_from_process_local_data(over_devices, array[share])
            for name, array in arrays.items()
        }
        _, state = step(state, batch)

    def whole(state: Any) -> Any:
        return jax.lax.with_sharding_constraint(collection.separated(state), everywhere)

    found = jax.device_get(jax.jit(whole)(state))
    results = {}
    for name, arrays in found.items():
        rows = slice(None)
        if tables[name].takes_keys:
            entries = jax_tt.table_keys(tables[name], arrays)
            entries = entries[np.argsort(entries["key"])]
            rows = entries["slot"]
            results |= {f"{name} {field}": entries[field] for field in ("key", "score", "touched")}
        if name.startswith("quantized"):
            results[f"{name} rows"] = np.asarray(tables[name].to_dense(arrays))
        for array, values in arrays.items():
            if array != "packed" and not array.startswith("hash_"):
                results[f"{name} {array}"] = values[rows] if values.ndim else values
    np.savez(path, **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
