"""Long runs of random operations on hash tables and on tiers against Python dicts.

    python -m tests.kinds.hashed.hash_soak --operations 1000000
    python -m tests.kinds.hashed.hash_soak --operations 100000 --methods cuda_emulated
    python -m tests.kinds.hashed.hash_soak --operations 250000 --seed 1  # other operations

An operation is one key that is requested and trained, read, removed, or moved by a dump. Keys are drawn from all 64-bit
integers. Gradients are small whole numbers and the rate of SGD is 1/2, so that rows are equal bit for bit whatever the
order of sums.
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

import jax_tt
from jax_tt._base.progress import Progress
from jax_tt._sets.hash_directory import POLICIES
from tests.kinds.hashed.hash_model import ModelDirectory, joined

D, POOL, BATCH, WAYS, SEED = 4, 20_000, 256, 8, 5
SIZES = (256, 512, 1024)
EXTREMES = (0, 1, 2**64 - 1, 2**63, 2**63 - 1)
RATE = np.float32(0.5)
RULE = jax_tt.optimizers.SGD(0.5)
Rows = dict[int, np.ndarray]


def pool_of(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Keys, and their initial rows."""
    keys = draw.integers(2**64, size=POOL, dtype=np.uint64)
    keys[: len(EXTREMES)] = EXTREMES
    table = jax_tt.hash_table(WAYS, D, seed=SEED, safe_check="ignore")
    ids = jax_tt.dynamic.split_keys(keys)
    lookup = jax_tt.Lookup(train=False, method="reference")
    rows, _ = jax_tt.lookup(table, table.init(jax.random.key(0)), ids, lookup)
    return keys, np.asarray(rows)


def drawn(draw: np.random.Generator, size: int) -> np.ndarray:
    """Numbers of keys in the pool, of which a few are frequent."""
    return (POOL ** draw.random(size)).astype(int) - 1


def trained(rows: Rows, keys: list[int], gradients: np.ndarray) -> None:
    """A step of SGD on those of the keys that have a row."""
    sums: Rows = {}
    for key, gradient in zip(keys, gradients, strict=True):
        if key in rows:
            sums[key] = sums.get(key, np.float32(0)) + gradient
    for key, total in sums.items():
        rows[key] = rows[key] - RATE * total


@functools.partial(jax.jit, static_argnums=(0, 5))
def _insert(
    table: Any, state: Any, ids: Any, scores: Any, epoch: Any, method: str
) -> tuple[Any, Any]:
    given = {"scores": scores, "epoch": epoch, "method": method}
    return jax_tt.dynamic.insert(table, state, ids, return_evicted=True, **given)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _step(table: Any, state: Any, ids: Any, gradients: Any, method: str) -> tuple[Any, Any]:
    def loss(own: Any) -> tuple[Any, Any]:
        lookup = jax_tt.Lookup(method=method)
        rows, _ = jax_tt.lookup(table, {**state, **own}, ids, lookup)
        return jnp.vdot(rows, gradients), rows

    own = {name: state[name] for name in table.spec.trained_names}
    (_, rows), new = jax.value_and_grad(loss, has_aux=True)(own)
    return {**state, **new}, rows


class HashRun:
    """A hash table, and what it should hold."""

    def __init__(self, policy: str, method: str, path: Path, seed: int = 0) -> None:
        self.draw = np.random.default_rng([seed, POLICIES.index(policy)])
        self.method, self.path, self.files = method, path, itertools.count()
        self.pool, self.first = pool_of(self.draw)
        self.table = self._table(policy, SIZES[0])
        self.state = self.table.init(jax.random.key(0))
        self.directory = ModelDirectory(self.table.sets, WAYS)
        self.rows: Rows = {}
        self.now, self.batches = 0, 0

    def _table(self, policy: str, capacity: int) -> Any:
        options = {"ways": WAYS, "policy": policy, "seed": SEED, "safe_check": "ignore"}
        age = 1 + POLICIES.index(policy) % 2
        return jax_tt.hash_table(
            capacity, D, optimizer=RULE, max_capacity=SIZES[-1], min_age=age, **options
        )

    def operate(self) -> int:
        """A random operation; returns for how many keys."""
        rare = (self.remove, self.remove_old, self.read, self.grow, self.move)
        chosen = self.draw.choice(len(rare) + 1, p=[0.8, 0.06, 0.02, 0.1, 0.01, 0.01])
        count = self.train() if chosen == 0 else rare[chosen - 1]()
        self.batches += 1
        if self.batches % 8 == 0:
            self.check()
        return count

    def train(self) -> int:
        """Finds or inserts the keys of a batch, reads and trains their rows."""
        numbers = drawn(self.draw, BATCH)
        keys, policy = self.pool[numbers], self.table.policy
        given = self.draw.integers(2**64, size=BATCH, dtype=np.uint64)
        self.now += 1
        epoch = self.now // 9 if policy.startswith("epoch") else None
        done, self.state = _insert(
            self.table,
            self.state,
            jax_tt.dynamic.split_keys(keys),
            jax_tt.dynamic.split_keys(given) if policy == "custom" else None,
            None if epoch is None else np.int32(epoch),
            self.method,
        )
        listed, here = keys.tolist(), [True] * BATCH
        entries, counts = self.directory.insert(
            listed, here, given.tolist(), self.now, epoch or 0, policy, self.table.min_age
        )
        assert {name: int(count) for name, count in done.counts.items()} == counts
        assert done.slots[: len(entries)].tolist() == sorted(entries)
        self._check_evicted(done.evicted, [old for _, old in entries.values() if old[2]])
        first = dict(zip(listed, self.first[numbers], strict=True))
        self.rows |= {key: first[key] for key, _ in entries.values()}
        gradients = self.draw.integers(-4, 5, (BATCH, D)).astype(np.float32)
        ids = jax_tt.dynamic.split_keys(keys)
        if self.now % 2:
            ids = jax_tt.dynamic.with_slots(ids, done)
        self.state, rows = _step(self.table, self.state, ids, gradients, self.method)
        self._check_rows(rows, listed, self.first[numbers])
        trained(self.rows, listed, gradients)
        return BATCH

    def read(self) -> int:
        """A lookup as in serving."""
        numbers = self.draw.integers(POOL, size=BATCH)
        numbers[::2] = drawn(self.draw, BATCH // 2)
        keys, lookup = self.pool[numbers], jax_tt.Lookup(train=False, method=self.method)
        rows, _ = jax_tt.lookup(self.table, self.state, jax_tt.dynamic.split_keys(keys), lookup)
        self._check_rows(rows, keys.tolist(), self.first[numbers])
        return BATCH

    def remove(self) -> int:
        """Removes given keys."""
        keys = self.pool[drawn(self.draw, 32)]
        slots = sorted({self.directory.find(key) for key in keys.tolist()} - {-1})
        gone, self.state = jax_tt.dynamic.remove(
            self.table, self.state, jax_tt.dynamic.split_keys(keys), method=self.method
        )
        return self._removed(gone, slots)

    def remove_old(self) -> int:
        """Removes some of the keys that were not requested for a while."""
        age, size = int(self.draw.integers(1, 9)), 64
        gone, self.state = jax_tt.dynamic.remove(
            self.table, self.state, where=lambda view: view.age >= age, size=size
        )
        old = [
            number * WAYS + way
            for number, own in enumerate(self.directory.sets)
            for way, entry in own.items()
            if self.now - entry[2] >= age
        ]
        return self._removed(gone, sorted(old)[:size])

    def _removed(self, gone: Any, slots: list[int]) -> int:
        entries = [self.directory.entry(slot) for slot in slots]
        assert joined(gone.keys)[: len(slots)].tolist() == [entry[0] for entry in entries]
        self._check_evicted(gone, entries)
        self.directory.erase(slots)
        return len(slots)

    def grow(self) -> int:
        """Doubles the capacity if the load exceeds a half."""
        keys, before = len(self.rows), self.table.num_embeddings
        capacity = before
        self.table, self.state = jax_tt.dynamic.grow_if_full(self.table, self.state, max_load=0.5)
        while 2 * keys > capacity and capacity < SIZES[-1]:
            self.directory, capacity = self.directory.doubled(), 2 * capacity
        assert self.table.num_embeddings == capacity
        self.check()
        return keys if capacity > before else 0

    def move(self) -> int:
        """Dumps the table, and loads it into one of any capacity; one that is too small stays as it is."""
        path = self.path / f"keys-{next(self.files)}"
        count = jax_tt.files.dump(self.table, self.state, path, rows_per_file=200, progress=False)
        assert count == len(self.rows)
        other = self._table(self.table.policy, int(self.draw.choice(SIZES)))
        empty = other.init(jax.random.key(1))
        try:
            counts, self.state = jax_tt.files.load_dump(
                other, empty, path, method=self.method, progress=False
            )
        except ValueError as error:
            assert other.num_embeddings < self.table.num_embeddings, error
            assert "keys find no room" in str(error)
            return 0
        self.table, before = other, self.directory
        self.directory, there = ModelDirectory(other.sets, WAYS), {}
        for key, slot, score, touched in jax_tt.dynamic.keys_of(other, self.state).tolist():
            assert before.entry(before.find(key)) == [key, score, touched]
            there[key] = self.rows[key]
            self.directory.sets[slot // WAYS][slot % WAYS] = [key, score, touched]
            assert self.directory.find(key) == slot
        assert (counts.rows, counts.evicted, len(there)) == (len(self.rows), 0, len(self.rows))
        self.rows = there
        self.check()
        return counts.rows

    def check(self) -> None:
        """The whole table."""
        entries = jax_tt.dynamic.keys_of(self.table, self.state)
        expected = {
            number * WAYS + way: tuple(entry)
            for number, own in enumerate(self.directory.sets)
            for way, entry in own.items()
        }
        listed = entries[["slot", "key", "score", "touched"]].tolist()
        assert {slot: tuple(rest) for slot, *rest in listed} == expected
        assert self.rows.keys() == {entry[0] for entry in expected.values()}
        rows = np.asarray(self.state["embedding"])[entries["slot"]]
        self._check_rows(rows, entries["key"].tolist(), rows)

    def _check_rows(self, rows: Any, keys: list[int], first: np.ndarray) -> None:
        expected = [self.rows.get(key, own) for key, own in zip(keys, first, strict=True)]
        np.testing.assert_array_equal(rows, np.array(expected).reshape(-1, D))

    def _check_evicted(self, found: Any, expected: list[list[int]]) -> None:
        there = np.asarray(found.touched) > 0
        got = zip(
            joined(found.keys)[there].tolist(),
            joined(found.scores)[there].tolist(),
            np.asarray(found.touched)[there].tolist(),
            np.asarray(found.arrays["embedding"])[there],
            strict=True,
        )
        known = {entry[0]: entry for entry in expected}
        assert int(there.sum()) == len(known)
        for key, score, touched, row in got:
            assert [key, score, touched] == known[key]
            np.testing.assert_array_equal(row, self.rows.pop(key))


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
        table = jax_tt.dense_table(int(rows), D, optimizer=RULE)
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
                self.collection, self.state, jnp.asarray(staged.batch["seen"]), gradients
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
    done = 0
    with tempfile.TemporaryDirectory() as path:
        made = make(Path(path))
        while done < operations:
            count = made.operate()
            done += count
            bar.step(count)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations against Python dicts.")
    parser.add_argument("--operations", type=int, default=1_000_000, help="with each method")
    parser.add_argument("--methods", nargs="+", default=["native", "reference"])
    parser.add_argument("--seed", type=int, default=0, help="of the random operations")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    share = -(-options.operations // (len(POLICIES) + 1))
    for method in options.methods:
        makers: dict[str, Callable[[Path], Any]] = {
            policy: functools.partial(HashRun, policy, method, seed=options.seed)
            for policy in POLICIES
        }
        makers["tiers"] = functools.partial(TiersRun, seed=options.seed)
        total = share * len(makers)
        with Progress(options.progress, method, total, delay=0, mininterval=5) as bar:
            counts = {name: run(make, share, bar) for name, make in makers.items()}
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        print(
            f"{method}, seed {options.seed}: {sum(counts.values()):,} operations, no difference ({listed})",
            flush=True,
        )


if __name__ == "__main__":
    main()
