"""Some steps of tables of every kind, with features of every kind.

    python -m tests.kinds.sharded.sharded_modes_run PROCESS COUNT PORT DEVICES OUT.npz

All processes together have ``DEVICES`` devices, 0 for tables that are not sharded. Writes what every step has looked
up, the gradients of weights, and the final tables with their optimizer state, those of hash tables in the order of
their keys; these grow at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Feature, RowCache, optimizers
from jax_tt._table.checkpoint import of_rows, unsharded
from jax_tt.planning import Exchange

STEPS, BATCH, LENGTH, ROWS, WIDTH = 12, 16, 4, 60, 8
# Of gradients that are sums over a batch, which are large where they are those of cores.
RATE = 1 / 512
RULES = {
    "adagrad": optimizers.RowWiseAdagrad(0.05),
    "gradients": None,
    "adam": optimizers.Adam(0.01),
}
# Of hash tables.
CHOICES = {
    "gradients": {"policy": "lru", "safe_check": "error"},
    "adagrad": {"policy": "lfu", "safe_check": "error"},
    "adam": {"policy": "lfu", "safe_check": "ignore", "admission": 2},
}
FEATURES: dict[str, str | None] = {
    "pooled": "sum",
    "weighted": "sum",
    "bags": "mean",
    "sequence": None,
}


def _dense(rule: str) -> Any:
    return jax_tt.dense_table(ROWS, WIDTH, optimizer=RULES[rule])


def _tensor_train(rule: str) -> Any:
    cache = RowCache(16, ways=4, refresh_every=5, write_back=None)
    return jax_tt.tt_table(ROWS, WIDTH, tt_ranks=4, optimizer=RULES[rule], cache=cache)


class Mode(NamedTuple):
    """Tables with the first rules, one for each feature.

    Attributes:
        table: of a rule.
        features: of the table of every rule, in their order.
        exchange: of rows and gradients.
        exact: whether the gradients of rows are small multiples of powers of two, whose sums are exact in any order.
    """

    table: Callable[[str], Any]
    features: tuple[str, ...]
    exchange: Exchange = Exchange(pooled="rows")
    exact: bool = False


MODES = {
    "rows": Mode(_dense, ("pooled", "weighted"), exact=True),
    "hash": Mode(
        lambda rule: jax_tt.hash_table(
            1024, WIDTH, optimizer=RULES[rule], max_capacity=2048, **CHOICES[rule]
        ),
        # Bags add initial rows of keys that are not admitted in another order.
        ("weighted", "bags", "sequence"),
        exact=True,
    ),
    "sums": Mode(_dense, ("weighted", "bags"), exchange=Exchange(pooled="sums")),
    # Its batches are divided over the devices, and the gradients of cores added. What leaves the cache is not fitted by
    # the cores: such a fit amplifies the rounding of sums.
    "cached": Mode(_tensor_train, ("sequence", "weighted")),
}


def _described(mode: str) -> tuple[dict[str, Any], dict[str, Feature]]:
    """The tables of a mode, named by it and their rule, and their features."""
    tables, features = {}, {}
    for rule, kind in zip(RULES, MODES[mode].features, strict=False):
        name = f"{mode} {rule}"
        tables[name] = MODES[mode].table(rule)
        features[f"{name} {kind}"] = Feature(name, combiner=FEATURES[kind])
    return tables, features


def _batches(keyed: bool, features: dict[str, Feature]) -> Iterator[dict[str, Any]]:
    """The arrays of every feature; ids of those of hash tables are two words."""
    rng = np.random.default_rng(0)
    # Ragged bags have their own batch size, and counts whose quotients are exact.
    counts = np.array([1, 4, 0, 2, 1, 1, 4, 2, 0, 4, 1])
    shapes = {
        "pooled": (BATCH, LENGTH),
        "weighted": (BATCH, LENGTH - 1),
        "bags": (counts.sum(),),
        "sequence": (BATCH, 2),
    }
    for _ in range(STEPS):
        ids = {kind: rng.integers(0, ROWS, shape) for kind, shape in shapes.items()}
        weights = rng.choice([0.5, 1, -2, 0.25], shapes["weighted"]).astype(np.float32)
        offsets = np.cumsum([0, *rng.permutation(counts)]).astype(np.int32)
        batch = {}
        for name in features:
            kind = name.split()[-1]
            own = ids[kind].astype(np.int32)
            if keyed:
                # The first words of many keys, and the last words of others, are the same.
                keys = np.where(own % 3 == 0, ids[kind] << 32, ids[kind] * 0x9E3779B97F4A7 + 5)
                own = jax_tt.dynamic.split_keys(keys).digits
            batch[name] = {"ids": own}
            batch[name] |= {"weights": weights} if kind == "weighted" else {}
            batch[name] |= {"offsets": offsets} if kind == "bags" else {}
        yield batch


def _loss(exact: bool, rows: dict[str, Any]) -> Any:
    def of(array: Any) -> Any:
        if not exact:
            return jnp.sum(jnp.sin(array))
        factors = jnp.array([1, -0.5, 2, 0.25])[jnp.arange(len(array)) % 4]
        return jnp.sum(factors.reshape(-1, *[1] * (array.ndim - 1)) * array)

    return sum(map(of, rows.values()))


def _by_length(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays of the same number of bags in one, since each is gathered from all devices."""
    found: dict[str, list[Any]] = {}
    for array in arrays.values():
        found.setdefault(f"{len(array)} bags", []).append(array.reshape(len(array), -1))
    return {name: jnp.concatenate(own, axis=1) for name, own in found.items()}


def _inputs(keyed: bool, arrays: Any, weights: Any) -> Any:
    def of(name: str, own: Any) -> Any:
        ids = jax_tt.SplitIds(own["ids"]) if keyed else own["ids"]
        if "weights" not in own and "offsets" not in own:
            return ids
        return jax_tt.Bags(ids, own.get("offsets"), weights.get(name))

    return {name: of(name, own) for name, own in arrays.items()}


def _run(mode: str, mesh: Mesh, divided: bool, share: slice) -> dict[str, Any]:
    """The results of one mode; ``share`` of every batch is that of this process."""
    tables, features = _described(mode)
    own, keyed = tables, mode == "hash"
    if divided and mode != "cached":
        own = jax_tt.shard_tables(tables, mesh, "model", exchange=MODES[mode].exchange)
    collection = jax_tt.Collection(own, features)
    over_devices, everywhere = NamedSharding(mesh, P("model")), NamedSharding(mesh, P())

    @jax.jit
    def step(state: Any, arrays: Any) -> Any:
        weights = {name: own["weights"] for name, own in arrays.items() if "weights" in own}
        batch = _inputs(keyed, arrays, weights)
        _, state = jax_tt.dynamic.insert(collection, state, batch)

        def loss(trained: Any, weights: Any) -> Any:
            before = collection.replaced(state, trained)
            batch = _inputs(keyed, arrays, weights)
            rows, after = jax_tt.lookup_features(collection, before, batch)
            return _loss(MODES[mode].exact, rows), (rows, after)

        (gradients, found), (rows, state) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            collection.trained(state), weights
        )
        state, gradients = collection.overwritten(state, gradients)
        stepped = {
            name: {array: state[name][array] - RATE * g for array, g in own.items()}
            for name, own in gradients.items()
        }
        state = collection.maintain(collection.replaced(state, stepped))
        seen = _by_length(rows | {f"{name} weights": g for name, g in found.items()})
        return jax.lax.with_sharding_constraint(seen, everywhere), state

    def placed(array: np.ndarray, ragged: bool) -> jax.Array:
        place = jax.make_array_from_process_local_data
        return place(everywhere, array) if ragged else place(over_devices, array[share])

    state = jax.jit(collection.init)(jax.random.key(0))
    seen: list[Any] = []
    for arrays in _batches(keyed, features):
        batch = {
            name: {key: placed(array, "offsets" in own) for key, array in own.items()}
            for name, own in arrays.items()
        }
        found, state = step(state, batch)
        seen.append(jax.device_get(found))

    larger, state = jax_tt.dynamic.grow_if_full(collection, state, max_load=0.04)

    def whole(state: Any) -> Any:
        return jax.lax.with_sharding_constraint(larger.separated(state), everywhere)

    results: dict[str, Any] = {
        f"{mode} {name} looked up": np.stack([own[name] for own in seen]) for name in seen[0]
    }
    for name, arrays in jax.device_get(jax.jit(whole)(state)).items():
        table: Any = unsharded(larger.tables[name]) if keyed else tables[name]
        results |= _final(name, table, jax.device_get(of_rows(table, arrays)))
    return results


def _final(name: str, table: Any, arrays: Any) -> dict[str, Any]:
    results, rows = {}, slice(None)
    if table.ids.takes_keys:
        assert table.num_embeddings == 2048
        entries = jax_tt.dynamic.keys_of(table, arrays)
        entries = entries[np.argsort(entries["key"])]
        rows = entries["slot"]
        results |= {f"{name} {field}": entries[field] for field in ("key", "score", "touched")}
    for array, values in arrays.items():
        if not array.startswith("hash_"):
            results[f"{name} {array}"] = values[rows] if values.ndim else values
    return results


def main(process: int, count: int, port: str, devices: int, path: str) -> None:
    # Most of the time is that of the compiler, and one program of all modes takes longer than one of each.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_num_cpu_devices", max(devices, 1) // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    mesh = jax.make_mesh((max(devices, 1),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    share = slice(process * BATCH // count, (process + 1) * BATCH // count)
    results: dict[str, Any] = {}
    for mode in MODES:
        results |= _run(mode, mesh, bool(devices), share)
    np.savez(path, **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
