"""Long runs of random operations on hash tables and on tiers against Python dicts.

    python -m tests.kinds.hashed.hash_soak --operations 1000000
    python -m tests.kinds.hashed.hash_soak --operations 100000 --methods cuda_emulated
    python -m tests.kinds.hashed.hash_soak --operations 250000 --seed 1  # other operations
    python -m tests.kinds.hashed.hash_soak --methods native --devices 1 2 4 8
    python -m tests.kinds.hashed.hash_soak --methods native --devices 2 8 --axis-type Explicit
    python -m tests.kinds.hashed.hash_soak --methods native --devices 8 --processes 2

An operation is one key that is requested and trained, read, removed, or moved by a dump. The operations with one seed
are the same whatever the number of devices. Keys are drawn from all 64-bit integers. Gradients are small whole
numbers and the rate of SGD is 1/2, so that rows are equal bit for bit whatever the order of sums.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jax_tt
from jax_tt._base.progress import Progress
from jax_tt._directories.hash_directory import POLICIES
from tests.kinds.hashed.hash_run import (
    BATCH,
    RULE,
    SEED,
    D,
    HashRun,
    device_numbers,
    drawn,
    pool_of,
    trained,
)
from tests.kinds.hashed.table_model import Rows
from tests.processes import launch


class TiersRun:
    """Tiers of random sizes, and the rows that they should hold."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.draw, self.path, self.files = np.random.default_rng(seed), path, itertools.count()
        self.pool, self.first = pool_of(self.draw)
        self.rows: Rows = {}
        self.saved: Rows | None = None
        self._open(path / "tiers-0")

    def _open(self, directory: Path) -> None:
        rows, host, depth = self.draw.choice([256, 512]), self.draw.choice([64, 256, 1024]), 3
        table = jax_tt.dense_table(int(rows), D, optimizer=RULE, takes_slots=True)
        self.collection = jax_tt.Collection({"item": table}, {"seen": jax_tt.Feature("item")})
        tier = jax_tt.Tier(
            host_rows=int(host), ways=8, seed=SEED, policy=str(self.draw.choice(["lru", "lfu"]))
        )
        depth = int(self.draw.integers(depth + 1))
        self.directory = directory
        self.tiers = jax_tt.Tiers(self.collection, {"item": tier}, path=directory, depth=depth)
        self.state = self.collection.init(jax.random.key(0))

    def operate(self) -> int:
        rare = (self.save, self.reopen, self.read, self.move)
        chosen = self.draw.choice(len(rare) + 1, p=[0.82, 0.05, 0.05, 0.05, 0.03])
        return self.train() if chosen == 0 else rare[chosen - 1]()

    def train(self) -> int:
        """Some of the batches that are prefetched; the others are not trained."""
        batches = [drawn(self.draw, 96) for _ in range(self.draw.integers(1, 8))]
        last = int(self.draw.integers(1, len(batches) + 1))
        given = ({"seen": self.pool[ranks][:, None]} for ranks in batches)
        iteration = cast(Generator[Any], self.tiers.prefetch(given))
        for numbers in batches[:last]:
            staged = next(iteration)
            self.state = self.tiers.load(self.state, staged)
            gradients = self.draw.integers(-4, 5, (numbers.size, D)).astype(np.float32)
            self.state, rows = _tiers_step(
                self.collection, self.state, staged.batch["seen"], gradients
            )
            keys = self.pool[numbers].tolist()
            for key, own in zip(keys, self.first[numbers], strict=True):
                self.rows.setdefault(key, own)
            np.testing.assert_array_equal(rows, np.stack([self.rows[key] for key in keys]))
            trained(self.rows, keys, gradients)
        iteration.close()
        return 96 * last

    def save(self) -> int:
        self.tiers.save(self.state, b"saved")
        self.saved = dict(self.rows)
        return 1

    def reopen(self) -> int:
        """Goes back to what was saved last."""
        if self.saved is None:
            return 0
        self.tiers.close()
        self._open(self.directory)
        found = self.tiers.restore(self.state)
        assert found is not None and found[0] == b"saved"
        self.state, self.rows = found[1], dict(self.saved)
        return 1

    def read(self) -> int:
        numbers = np.unique(drawn(self.draw, BATCH))
        rows = self.tiers.read(self.state, "item", self.pool[numbers])
        keys = self.pool[numbers].tolist()
        expected = [
            self.rows.get(key, own) for key, own in zip(keys, self.first[numbers], strict=True)
        ]
        np.testing.assert_array_equal(rows, np.array(expected))
        return numbers.size

    def move(self) -> int:
        """Dumps all rows, and loads them into other tiers."""
        number = next(self.files)
        path = self.path / f"rows-{number}"
        self.tiers.dump(self.state, "item", path, rows_per_file=500)
        self.tiers.close()
        self._open(self.path / f"tiers-{number + 1}")
        self.saved = None
        self.state = self.tiers.load_dump(self.state, "item", path)
        return len(self.rows)


@functools.partial(jax.jit, static_argnums=0)
def _tiers_step(collection: Any, state: Any, slots: Any, gradients: Any) -> tuple[Any, Any]:
    def loss(own: Any) -> tuple[Any, Any]:
        arrays = collection.replaced(state, own)
        rows, _ = jax_tt.lookup_features(collection, arrays, {"seen": slots})
        return jnp.vdot(rows["seen"], gradients), rows["seen"]

    (_, rows), found = jax.value_and_grad(loss, has_aux=True)(collection.trained(state))
    return collection.overwritten(state, found)[0], rows


def run(make: Callable[[Path], Any], operations: int, bar: Progress) -> int:
    """Makes random operations until there are this many, and returns their number.

    Raises:
        AssertionError: the table and the dicts differ.
    """
    with tempfile.TemporaryDirectory() as path:
        return operated(make(Path(path)), operations, bar)


def operated(made: Any, operations: int, bar: Progress) -> int:
    """As `run`, of one that is made."""
    done = 0
    while done < operations:
        count = made.operate()
        done += count
        bar.step(count)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations against Python dicts.")
    parser.add_argument("--operations", type=int, default=1_000_000, help="with each method")
    parser.add_argument("--methods", nargs="+", default=["native", "reference"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1], help="of the hash tables")
    parser.add_argument("--processes", type=int, default=1, help="that share the devices")
    kinds = [AxisType.Auto.name, AxisType.Explicit.name]
    parser.add_argument("--axis-type", choices=kinds, default=kinds[0], help="of the meshes")
    parser.add_argument("--seed", type=int, default=0, help="of the random operations")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    if options.processes > 1:
        for method, devices in itertools.product(options.methods, options.devices):
            given = map(str, (devices, method, options.operations, options.seed, *POLICIES))
            with tempfile.TemporaryDirectory() as path:
                every = launch(
                    Path(path), options.processes, "kinds.sharded.model_run", *given, timeout=None
                )
            counts = {name: int(count) for name, count in every[0].items()}
            told(f"{method}, {devices} devices of {options.processes} processes", options, counts)
        return
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    for method in options.methods:
        makers: dict[str, Callable[[Path], Any]] = {
            f"{policy} on {devices}": functools.partial(
                HashRun,
                policy,
                method,
                seed=options.seed,
                devices=devices,
                others=device_numbers(),
                axis_type=AxisType[options.axis_type],
            )
            for devices, policy in itertools.product(options.devices, POLICIES)
        }
        makers["tiers"] = functools.partial(TiersRun, seed=options.seed)
        share = -(-options.operations // len(makers))
        with Progress(options.progress, method, share * len(makers), delay=0, mininterval=5) as bar:
            told(method, options, {name: run(make, share, bar) for name, make in makers.items()})


def told(what: str, options: argparse.Namespace, counts: dict[str, int]) -> None:
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    total = f"{sum(counts.values()):,} operations"
    print(f"{what}, seed {options.seed}: {total}, no difference ({listed})", flush=True)


if __name__ == "__main__":
    main()
