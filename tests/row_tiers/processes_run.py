"""One process of training through tiers on four devices, which belong to several processes.

    python -m tests.row_tiers.processes_run PROCESS COUNT PORT FOLDER OUT.npz

Tiers and dumps are written to ``FOLDER``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt._tiers import processes, saved, table

DEVICES, POOL, BATCH, D = 4, 120, 16, 4
IDS = np.random.default_rng(0).integers(0, 2**64, POOL, dtype=np.uint64)
TIERED = ("item", "word")


def collection_of(mesh: Mesh) -> Any:
    """Tables of which a mesh of two axes has one alone."""
    adagrad, sgd = jax_tt.optimizers.Adagrad(0.5), jax_tt.optimizers.SGD(0.5)
    tables = {"item": jax_tt.dense_table(48, D, optimizer=adagrad, takes_slots=True)}
    if len(mesh.axis_names) == 1:
        narrow = {"param_dtype": jnp.bfloat16, "stochastic_rounding": False}
        tables |= {
            "word": jax_tt.dense_table(32, D, optimizer=sgd, takes_slots=True, **narrow),
            "city": jax_tt.dense_table(21, D, optimizer=adagrad),
        }
    features = {name: jax_tt.Feature(name) for name in tables}
    return jax_tt.Collection(jax_tt.shard_tables(tables, mesh, "model"), features)


@partial(jax.jit, static_argnums=0)
def init(collection: Any) -> Any:
    return collection.init(jax.random.key(0))


def batches(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Ids that drift; whole numbers as gradients, whose sums do not depend on their order."""
    for k in range(first, first + count):
        draw = np.random.default_rng([5, k])
        ranks = (draw.zipf(1.2, BATCH) * 7 + k) % POOL
        batch = {"item": IDS[ranks], "word": IDS[ranks[::-1] // 2], "city": ranks % 21}
        batch = {name: ids[:, None] for name, ids in batch.items()}
        batch["gradients"] = draw.integers(-3, 4, (BATCH, D)).astype(np.float32)
        yield batch


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def step(collection: Any, state: Any, batch: Any, gradients: Any) -> Any:
    def loss(trained: Any) -> Any:
        arrays = collection.replaced(state, trained)
        rows, _ = jax_tt.lookup_features(collection, arrays, batch)
        return sum(jnp.sum(row.astype(jnp.float32) * gradients) for row in rows.values())

    return collection.overwritten(state, jax.grad(loss)(collection.trained(state)))[0]


class Run:
    """Tiers on a mesh, and what is compared between runs of one and of several processes."""

    def __init__(self, mesh: Mesh, processes: int):
        self.mesh, self.processes = mesh, processes
        self.state: Any = None
        self.results: dict[str, Any] = {}

    def open(self, path: Path | None, rows: int = 0, depth: int = 2, **options: Any) -> Any:
        collection = collection_of(self.mesh)
        tier = {
            name: jax_tt.Tier(host_rows=rows or 24 // self.processes, seed=3, **options)
            for name in TIERED
            if name in collection.tables
        }
        state = init(collection)
        return jax_tt.Tiers(collection, tier, path=path, depth=depth), state

    def train(
        self, tiers: Any, state: Any, given: Any, last: int | None = None, **epoch: int
    ) -> Any:
        sharding = NamedSharding(self.mesh, P("model"))
        for staged in tiers.prefetch(given, **epoch):
            self.state = state = tiers.load(state, staged)
            arrays = {name: staged.batch[name] for name in tiers.collection.features}
            placed = jax.tree.map(
                lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]),
                (arrays, staged.other["gradients"]),
            )
            self.state = state = step(tiers.collection, state, *placed)
            if staged.number == last:
                break
        return state

    def note(self, name: str, tiers: Any, state: Any) -> None:
        for one, counts in tiers.statistics().items():
            rows = tiers.read(state, one, IDS)
            self.results[f"{name} {one}"] = rows.view(np.uint8)
            totals = (*counts[:3], counts.host_hits + counts.disk_hits, *counts[5:7])
            self.results[f"{name} {one} counts"] = np.array(totals)
            # Which rows are on disk depends on the keys that a process has.
            self.results[f"disk {name} {one}"] = np.array([counts.disk_hits, counts.to_disk])
        if "city" in state:
            whole = jax.device_put(state["city"]["embedding"], NamedSharding(self.mesh, P()))
            self.results[f"{name} city"] = np.asarray(whole)

    def error(self, name: str, kind: type[Exception], call: Callable[[], Any]) -> None:
        try:
            call()
        except kind as error:
            self.results[f"error {name}"] = np.array(str(error))
            return
        raise AssertionError(f"{name}: no {kind.__name__}")


def train_save_and_change(run: Run, folder: Path) -> None:
    tiers, state = run.open(folder / "tiers", admission=2)
    state = run.train(tiers, state, batches(0, 10), epoch=1)
    run.note("trained", tiers, state)
    tiers.save(state, b"ten")
    state = run.train(tiers, state, batches(10, 8), 12, epoch=2)  # some were prepared ahead
    run.note("left early", tiers, state)
    state = run.train(tiers, state, batches(13, 3), epoch=2)
    run.note("went on", tiers, state)
    tiers.close()

    tiers, state = run.open(folder / "tiers", admission=2)
    other, state = tiers.restore(state)
    assert other == b"ten"
    run.note("restored", tiers, state)
    state = run.train(tiers, state, batches(10, 3), epoch=2)
    run.note("trained again", tiers, state)
    for name in TIERED:
        tiers.dump(state, name, folder / f"{name}-whole", rows_per_file=20, progress=False)
        gone = [tiers.remove(name, where=lambda view: view.age > 9), tiers.remove(name, IDS[:9])]
        run.results[f"gone {name}"] = np.concatenate(gone)
    state = run.train(tiers, state, batches(13, 3), epoch=3)
    for name in TIERED:
        written = tiers.dump(
            state,
            name,
            folder / f"{name}-changes",
            since=folder / f"{name}-whole",
            rows_per_file=20,
            progress=False,
        )
        run.results[f"written {name}"] = np.array(written)
    tiers.save(state)
    run.note("changed", tiers, state)
    tiers.close()

    tiers, state = run.open(None, POOL, admission=2)
    for name in TIERED:
        for dump in "whole", "changes":
            state = tiers.load_dump(state, name, folder / f"{name}-{dump}", progress=False)
        run.results[f"loaded {name}"] = tiers.read(state, name, IDS).view(np.uint8)
    state = run.train(tiers, state, batches(16, 2))
    run.note("after dumps", tiers, state)


def fail_and_go_on(run: Run, folder: Path, process: int) -> None:
    """Batches that differ, end early or fail in one process, and host memory that is full."""

    def train(tiers: Any, given: Any) -> None:
        run.train(tiers, run.state, given)

    def other() -> Iterator[Any]:
        yield from batches(4, 2)
        yield from batches(6 + process, 3)

    def failing() -> Iterator[Any]:
        yield from batches(6, 1)
        if process:
            raise OSError("no such file")
        yield from batches(7, 4)

    tiers, run.state = run.open(None, POOL)
    train(tiers, batches(0, 4))
    if run.processes == 1:
        train(tiers, batches(4, 5))
    else:
        run.error("ids", ValueError, lambda: train(tiers, other()))
        run.error("failed", OSError if process else RuntimeError, lambda: train(tiers, failing()))
        run.error("end", ValueError, lambda: train(tiers, batches(7, 3 - process)))
    train(tiers, batches(9, 2))
    run.note("after errors", tiers, run.state)

    tiers, run.state = run.open(None, 4 // run.processes, depth=0)
    errors = []
    for k in range(4):
        try:
            train(tiers, batches(k, 1))
        except (jax_tt.files.StoreError, RuntimeError) as error:
            errors.append(str(error))
            tiers.grow_host("item", POOL)
            train(tiers, batches(k, 1))
    run.results["error full"] = np.array(errors)
    run.note("after full memory", tiers, run.state)
    if run.processes > 1:
        rule = jax_tt.optimizers.SGD(0.5)
        plain = jax_tt.dense_table(48, D, optimizer=rule, takes_slots=True)
        tables = {**collection_of(run.mesh).tables, "plain": plain}
        item = {"item": jax_tt.Tier(host_rows=8, seed=process)}
        run.error("seed", ValueError, lambda: jax_tt.Tiers(tiers.collection, item))
        run.error("depth", ValueError, lambda: run.open(None, depth=process))
        mixed = jax_tt.Collection(tables, {name: jax_tt.Feature(name) for name in tables})
        tiers_of = dict.fromkeys(tables, jax_tt.Tier(host_rows=8))
        run.error("mixed", ValueError, lambda: jax_tt.Tiers(mixed, tiers_of))
        alone = folder.with_name("one") / "tiers"
        run.error("number", jax_tt.files.StoreError, lambda: run.open(alone))


def grow_one(run: Run, folder: Path, process: int) -> None:
    """The host memory of one process has more room than that of another."""
    tiers, run.state = run.open(folder / "grown", admission=3)
    if not process:
        tiers.grow_host("item", 60)
    tiers.save(run.train(tiers, run.state, batches(0, 3)))
    tiers.close()
    collection = tiers.collection
    disks = [folder / f"disk-{number}" for number in (process, 1 - process)]
    tiers, state = run.open(disks[0])
    tiers.save(run.train(tiers, state, batches(0, 1)))
    tiers.close()
    run.error("disks", jax_tt.files.StoreError, lambda: run.open(disks[1]))
    tier = {"item": jax_tt.Tier(seed=3, admission=3)}
    with jax_tt.Tiers(collection, tier, path=folder / "grown") as tiers:
        # More keys wait than the smaller one has room for.
        run.state = run.train(tiers, init(collection), batches(3, 20))
        run.results["grown"] = tiers.read(run.state, "item", IDS).view(np.uint8)

        def fails(view: Any) -> Any:
            if process:
                raise ZeroDivisionError
            return view.age > 3

        kind = ZeroDivisionError if process else jax_tt.files.StoreError
        run.error("where", kind, lambda: tiers.remove("item", where=fails))
    path = folder / "dump"
    with jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=POOL)}) as tiers:
        state = run.train(tiers, init(collection), batches(0, 9))
        tiers.dump(state, "item", path, progress=False)
    with jax_tt.Tiers(collection, {"item": jax_tt.Tier(host_rows=1)}) as tiers:
        if process:
            tiers.grow_host("item", POOL)
        full = partial(tiers.load_dump, init(collection), "item", path, progress=False)
        run.error("full dump", jax_tt.files.StoreError, full)


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Messages and blocks of the library are so small that there are several of each."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in (
            (saved, "_BLOCK", 10),
            (processes, "_CHUNK", 500),
            (table, "_CHUNK", 20),
        ):
            patch.setattr(module, name, size)
        yield


def results(process: int, count: int, folder: Path) -> dict[str, Any]:
    explicit = jax.make_mesh((DEVICES,), ("model",), axis_types=(AxisType.Explicit,))
    run = Run(explicit, count)
    with jax.set_mesh(explicit):
        train_save_and_change(run, folder)
    # The devices of both processes have all rows.
    run.mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    fail_and_go_on(run, folder, process)
    if count > 1:
        grow_one(run, folder, process)
    return run.results


def main(process: int, count: int, port: str, folder: Path, path: str) -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process)
    with small_pieces():
        np.savez(path, **results(process, count, folder))


if __name__ == "__main__":
    number, count, port, folder, out = sys.argv[1:]
    main(int(number), int(count), port, Path(folder), out)
