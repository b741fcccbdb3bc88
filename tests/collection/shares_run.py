"""One of several processes that make one batch of their shares, on as many devices as the tests have.

    python -m tests.collection.shares_run PROCESS COUNT PORT OUT.npz

Does one thing after another, since every start takes seconds.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt._collection import host_shares

DEVICES, SAMPLES = 4, 8
TABLES = {"item": jax_tt.dense_table(48, 4), "key": jax_tt.hash_table(64, 4)}
FEATURES = {
    "clicked": jax_tt.Feature("item"),
    "seen": jax_tt.Feature("item", combiner=None),
    "user": jax_tt.Feature("key"),
}
PLAIN = {"a": jax_tt.Feature("item"), "b": jax_tt.Feature("item", combiner="mean")}
# Between which samples the shares end.
CUTS = {"unequal": 3, "equal": 4, "empty": 8, "empty first": 0}


def rectangle(first: int, last: int, columns: int) -> np.ndarray:
    return np.arange(first, last)[:, None] * 5 % 40 + np.arange(columns)


def lists(first: int, last: int, most: int = 4) -> list[list[int]]:
    return [[(7 * k + j) % 48 for j in range(k % most)] for k in range(first, last)]


def entries(first: int, last: int, weighted: bool = False) -> dict[str, Any]:
    rows = lists(first, last)
    ids = np.array([i for row in rows for i in row], np.int64)
    given = {"ids": ids, "lengths": [len(row) for row in rows]}
    return given | ({"weights": (ids + 1) / np.float32(8)} if weighted else {})


def keyed(first: int, last: int) -> jax_tt.KeyedBags:
    bags = {
        "b": jax_tt.Bags.from_ragged(lists(first, last)),
        "a": jax_tt.Bags.from_ragged(lists(2 * first, 2 * last, 3)),  # twice as many bags
    }
    bags["a"] = jax_tt.Bags.from_offsets(
        bags["a"].ids, bags["a"].offsets, bags["a"].ids.astype(np.float32)
    )
    return jax_tt.KeyedBags.from_bags(bags)


# A batch of some of the samples, and the features that it has.
BATCHES: dict[str, tuple[Any, Callable[[int, int], Any]]] = {
    "rectangles": (
        FEATURES,
        lambda a, b: {
            "clicked": rectangle(a, b, 3),
            "seen": rectangle(a, b, 4).reshape(b - a, 2, 2).astype(np.uint8),
            "user": np.uint64(2**40) + rectangle(a, b, 1).astype(np.uint64),
        },
    ),
    "one id each": (PLAIN, lambda a, b: {k: rectangle(a, b, 1)[:, 0] for k in PLAIN}),
    "lists": (
        FEATURES,
        lambda a, b: dict.fromkeys(FEATURES, lists(a, b)) | {"seen": entries(a, b)},
    ),
    "weighted": (PLAIN, lambda a, b: {"a": entries(a, b, True), "b": entries(a, b)}),
    "padded": (
        PLAIN,
        lambda a, b: {key: {"ids": rectangle(a, b, 3) % 7, "pad_id": 2} for key in PLAIN},
    ),
    "bags": (
        PLAIN,
        # Of shares with a capacity, the batch has the sum.
        lambda a, b: dict.fromkeys(
            PLAIN, jax_tt.Bags.from_ragged(lists(a, b), capacity=20 if b - a < SAMPLES else 40)
        ),
    ),
    "KeyedBags": (PLAIN, keyed),
    "KeyedBags of keys": (
        {"a": FEATURES["user"], "b": FEATURES["clicked"]},
        keyed,
    ),
}


def mesh_of(devices: Any = None) -> Mesh:
    return Mesh(np.array(jax.devices() if devices is None else devices), ("data",))


def collection_of(features: Any, mesh: Mesh | None = None) -> jax_tt.Collection:
    tables = {one.table: TABLES[one.table] for one in features.values()}
    return jax_tt.Collection(
        tables if mesh is None else jax_tt.shard_tables(tables, mesh, "data"), features
    )


def share(make: Callable[[int, int], Any], process: int, cut: int) -> Any:
    return make(0, cut) if process == 0 else make(cut, SAMPLES)


def on_host(batch: Any, mesh: Mesh) -> list[np.ndarray]:
    whole = jax.jit(lambda batch: batch, out_shardings=NamedSharding(mesh, P()))(batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(whole)]


def error(call: Callable[[], Any]) -> np.ndarray:
    try:
        call()
    except (RuntimeError, ValueError) as raised:
        return np.array(f"{type(raised).__name__}: {raised}")
    return np.array("")


def errors(process: int, mesh: Mesh) -> dict[str, np.ndarray]:
    plain, table = collection_of(PLAIN, mesh), TABLES["item"]
    rows = NamedSharding(mesh, P("data"))
    own, same = ({"a": lists(0, 1 + n), "b": lists(0, 1)} for n in (process, 0))
    wrong = {"a": [[process * 100]], "b": [[1]]}
    found = {"own": error(lambda: plain.host_batch(own))}
    host_shares.COMPARED_EVERY = 3
    for k in range(2, 8):
        given = same if k % 3 == 1 else own  # compared, and not
        found[f"call {k}"] = error(lambda given=given: plain.host_batch(given))
    found["every"] = error(lambda: [plain.host_batch(own) for _ in range(3)])
    host_shares._calls.clear()
    found["one fails"] = error(lambda: collection_of(PLAIN, mesh).host_batch(wrong, bounds="error"))
    for name, given in {
        "one fails locally": wrong,
        "form": {"a": lists(0, 2) if process else rectangle(0, 2, 3), "b": lists(0, 1)},
        "columns": {"a": rectangle(0, 2, 3 + process), "b": lists(0, 1)},
        "weights": {"a": entries(0, 2, bool(process)), "b": lists(0, 1)},
    }.items():
        found[name] = error(lambda given=given: plain.host_batch(given, local=True, bounds="error"))
    found["capacity"] = error(lambda: plain.host_batch(own, capacity=8 + process, local=True))
    turned = keyed(0, 2)
    bags = {key: turned[key] for key in (("a", "b") if process else ("b", "a"))}
    turned = jax_tt.KeyedBags.from_bags(bags)
    found["order"] = error(lambda: plain.host_batch(turned, local=True))
    single = jax_tt.pipeline.host_batch
    for name, sharding in {"none": None, "replicated": NamedSharding(mesh, P())}.items():
        found[name] = error(lambda at=sharding: single(table, [[1]], sharding=at, local=True))
    halves = Mesh(np.array(jax.devices()).reshape(2, 2).T, ("data", "model"))
    both = NamedSharding(halves, P("data"))  # processes along the other axis
    found["both"] = error(lambda: single(table, [[1]], sharding=both, local=True))

    def in_a_thread() -> None:  # of a loader: nothing waits
        found["thread"] = error(lambda: single(table, [[process]], sharding=rows))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    return found


def results(process: int) -> dict[str, np.ndarray]:
    mesh, found = mesh_of(), {}
    for (name, (features, make)), (cut, at) in itertools.product(BATCHES.items(), CUTS.items()):
        batch = collection_of(features, mesh).host_batch(share(make, process, at), local=True)
        for k, leaf in enumerate(on_host(batch, mesh)):
            found[f"{name} {cut} {k}"] = leaf
    turned = mesh_of(jax.devices()[::-1])
    rows = NamedSharding(turned, P("data"))
    given = share(lambda a, b: rectangle(a, b, 2).astype(np.int32), process, 4)
    batch = jax_tt.pipeline.host_batch(TABLES["item"], given, sharding=rows, local=True)
    (found["turned"],) = on_host(batch, turned)
    jaxs = jax.make_array_from_process_local_data(rows, given)
    (found["turned by JAX"],) = on_host(jaxs, turned)
    tables = {"item": TABLES["item"]}
    layers = {
        "nnx": jax_tt.EmbedCollection(tables, PLAIN, rngs=nnx.Rngs(0)),
        "linen": jax_tt.linen.EmbedCollection(tables, PLAIN),
    }
    given = dict.fromkeys(PLAIN, share(lists, process, 3))
    for name, layer in layers.items():
        batch = layer.host_batch(given, sharding=NamedSharding(mesh, P("data")), local=True)
        found[name] = on_host(batch, mesh)[0]
    return found | {f"error {name}": text for name, text in errors(process, mesh).items()}


def main(process: int, count: int, port: str, path: str) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    np.savez(path, **results(process))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
