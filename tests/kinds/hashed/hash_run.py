"""Random operations on a hash table, on one device or on several of one or more processes, against Python dicts."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt._directories.batch_clock import LAST
from jax_tt._directories.hash_directory import CLOCK, POLICIES, WAITING, directory_of
from jax_tt._directories.hashing import owners_of_keys
from jax_tt._directories.placing import ENTRY, entries_of, words_of_keys
from jax_tt._jax.on_host import like_on_device, on_host
from jax_tt._table.wrapper import is_sharded
from tests.kinds.hashed.hash_model import joined
from tests.kinds.hashed.table_model import Content, ModelTable, Rows, Sizes

D, POOL, BATCH, WAYS, SEED = 4, 20_000, 256, 8, 5
# Multiples of the ways times 8 devices; those of 3 devices have three quarters of them.
SIZES = (256, 512, 1024)
REMOVED = 32
EXTREMES = (0, 1, 2**64 - 1, 2**63, 2**63 - 1)
RATE = np.float32(0.5)
RULE = jax_tt.optimizers.SGD(0.5)
# By policy: the admission, and of how many keys of the pool batches are. The keys that wait fill the first directory,
# and leave it; the second one, a multiple of the ways times 8 and times 3 devices, has room for all.
ADMISSIONS: dict[str, tuple[Any, int]] = {
    "lfu": (jax_tt.dynamic.AdmitAfter(2), POOL),
    "epoch_lru": (jax_tt.dynamic.AdmitAfter(3, waiting=3072), 2000),
    "epoch_lfu": (jax_tt.dynamic.AdmitWithProbability(0.3), POOL),
}
# How often each operation is chosen.
SHARES = {
    "train": 0.79,
    "remove": 0.05,
    "remove_old": 0.02,
    "read": 0.05,
    "serve": 0.03,
    "grow": 0.01,
    "age": 0.01,
    "dump": 0.02,
    "move": 0.01,
    "merge": 0.01,
}


def pool_of(draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Keys, and their initial rows."""
    keys = draw.integers(2**64, size=POOL, dtype=np.uint64)
    keys[: len(EXTREMES)] = EXTREMES
    table = jax_tt.hash_table(WAYS, D, seed=SEED, safe_check="ignore")
    ids = jax_tt.dynamic.split_keys(keys)
    lookup = jax_tt.Lookup(train=False, method="reference")
    rows, _ = jax_tt.lookup(table, table.init(jax.random.key(0)), ids, lookup)
    return keys, np.asarray(rows)


def drawn(draw: np.random.Generator, size: int, pool: int = POOL) -> np.ndarray:
    """Numbers of keys in the pool, of which a few are frequent."""
    return (pool ** draw.random(size)).astype(int) - 1


def trained(rows: Rows, keys: list[int], gradients: np.ndarray) -> None:
    """A step of SGD on those of the keys that have a row."""
    sums: Rows = {}
    for key, gradient in zip(keys, gradients, strict=True):
        if key in rows:
            sums[key] = sums.get(key, np.float32(0)) + gradient
    for key, total in sums.items():
        rows[key] = rows[key] - RATE * total


@functools.partial(jax.jit, static_argnums=0)
def _start(table: Any) -> Any:
    return table.init(jax.random.key(0))


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
        return jnp.sum(rows * gradients), rows

    own = {name: state[name] for name in table.spec.trained_names}
    (_, rows), new = jax.value_and_grad(loss, has_aux=True)(own)
    return {**state, **new}, rows


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _read(table: Any, state: Any, ids: Any, train: bool, method: str) -> Any:
    return jax_tt.lookup(table, state, ids, jax_tt.Lookup(train=train, method=method))[0]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _remove(table: Any, state: Any, keys: Any, method: str) -> tuple[Any, Any]:
    return jax_tt.dynamic.remove(table, state, keys, method=method)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _remove_old(table: Any, state: Any, age: Any, size: int) -> tuple[Any, Any]:
    return jax_tt.dynamic.remove(table, state, where=lambda view: view.age >= age, size=size)


def device_numbers() -> tuple[int, ...]:
    """The numbers of devices on which all processes can have a table."""
    count = jax.process_count()
    most = jax.device_count()
    return 1, *(number for number in (2, 3, 4, 8) if number <= most and number % count == 0)


class Dumped(NamedTuple):
    """A dump, what it should have, and where the keys were."""

    path: Path
    brought: set[int]
    content: Content
    sizes: Sizes
    slots: dict[int, list[int]]


class HashRun:
    """A hash table, and what it should hold.

    Args:
        policy: of the table.
        method: as in `Lookup`.
        path: of a directory for dumps, which all processes see.
        seed: of the random operations.
        devices: over which the table is sharded, the first ones; 1 for a table that is not.
        others: numbers of devices through which dumps go on their way into another table.
        sizes: capacities of the table.
        axis_type: of the mesh of these devices.
    """

    def __init__(
        self,
        policy: str,
        method: str,
        path: Path,
        seed: int = 0,
        *,
        devices: int = 1,
        others: tuple[int, ...] = (1,),
        sizes: tuple[int, ...] = SIZES,
        axis_type: AxisType = AxisType.Auto,
    ) -> None:
        self.draw = np.random.default_rng([seed, POLICIES.index(policy)])
        self.policy, self.method, self.path = policy, method, path
        self.admission, self.keys = ADMISSIONS.get(policy, (None, POOL))
        self.devices, self.others, self.sizes = devices, others, sizes
        self.axis_type = axis_type
        self.pool, self.first = pool_of(self.draw)
        self.table = self._table(devices, sizes[0])
        owners = owners_of_keys(words_of_keys(self.pool[: self.keys]), 8)
        (self.of_one_device,) = np.nonzero(owners == 0)
        self.state = self._started(self.table)
        self.model = ModelTable(self.table)
        self.dumps: list[Dumped] = []
        self.files, self.batches, self.operations = itertools.count(), 0, 0

    def _table(self, devices: int, capacity: int) -> Any:
        share = 3 if devices == 3 else 4
        plain = jax_tt.hash_table(
            capacity * share // 4,
            D,
            optimizer=RULE,
            max_capacity=max(capacity, self.sizes[-1]) * share // 4,
            min_age=1 + POLICIES.index(self.policy) % 2,
            admission=self.admission,
            ways=WAYS,
            policy=self.policy,
            seed=SEED,
            safe_check="ignore",
        )
        if devices == 1:
            return plain
        # Of every process as many.
        places = np.array(jax.devices()).reshape(jax.process_count(), -1)
        some = places[:, : devices // len(places)].reshape(-1)
        mesh = Mesh(some, ("model",), axis_types=(self.axis_type,))
        return jax_tt.shard_tables({"item": plain}, mesh, "model")["item"]

    def _started(self, table: Any) -> Any:
        with self._mesh_of(table):
            return _start(table)

    def _mesh_of(self, table: Any) -> contextlib.AbstractContextManager[Any]:
        """The context for what is done with a table: its mesh, if the axes are explicit."""
        explicit = is_sharded(table) and self.axis_type == AxisType.Explicit
        return jax.set_mesh(table.mesh) if explicit else contextlib.nullcontext()

    def _of_batch(self, array: np.ndarray) -> Any:
        """An array of a batch where the devices of the table expect it."""
        if not is_sharded(self.table):
            return array
        where = NamedSharding(self.table.mesh, P("model"))
        return jax.make_array_from_callback(array.shape, where, lambda index: array[index])

    def _ids(self, keys: np.ndarray) -> Any:
        return jax_tt.SplitIds(self._of_batch(jax_tt.dynamic.split_keys(keys).digits))

    def operate(self) -> int:
        """A random operation; returns for how many keys."""
        name = str(self.draw.choice(list(SHARES), p=list(SHARES.values())))
        with self._mesh_of(self.table):
            count = getattr(self, name)()
            self.operations += 1
            if self.operations % 8 == 0:
                self.check()
        return count

    def train(self) -> int:
        """Finds or inserts the keys of a batch, reads and trains their rows."""
        numbers = drawn(self.draw, BATCH, self.keys)
        if self.draw.random() < 0.1:  # too many for one message
            numbers = self.of_one_device[numbers % len(self.of_one_device)]
        keys, model = self.pool[numbers], self.model
        given = self.draw.integers(2**64, size=BATCH, dtype=np.uint64)
        self.batches += 1
        epoch = self.batches // 9 if self.policy.startswith("epoch") else None
        ids = self._ids(keys)
        done, self.state = _insert(
            self.table,
            self.state,
            ids,
            self._ids(given) if self.policy == "custom" else None,
            None if epoch is None else np.int32(epoch),
            self.method,
        )
        listed = keys.tolist()
        entries, counts = model.insert(listed, given.tolist(), epoch or 0)
        assert {name: int(count) for name, count in done.counts.items()} == counts
        if done.slots is not None:
            assert done.slots.numbers[: len(entries)].tolist() == sorted(entries)
        self._check_evicted(done.evicted, [old for _, old in entries.values() if old[2]])
        first = dict(zip(listed, self.first[numbers], strict=True))
        model.rows |= {key: first[key] for key, _ in entries.values()}
        gradients = self.draw.integers(-4, 5, (BATCH, D)).astype(np.float32)
        if self.batches % 2 and not is_sharded(self.table):
            ids = jax_tt.dynamic.with_slots(ids, done)
        self.state, rows = _step(
            self.table, self.state, ids, self._of_batch(gradients), self.method
        )
        self._check_rows(rows, listed, self.first[numbers])
        trained(model.rows, listed, gradients)
        return BATCH

    def read(self) -> int:
        """A lookup that trains nothing."""
        return self._lookup(self.table, self.state, train=False)

    def serve(self) -> int:
        """A lookup of the frozen table."""
        return self._lookup(*jax_tt.extension.freeze(self.table, self.state), train=True)

    def _lookup(self, table: Any, state: Any, train: bool) -> int:
        numbers = self.draw.integers(POOL, size=BATCH)
        numbers[::2] = drawn(self.draw, BATCH // 2, self.keys)
        keys = self.pool[numbers]
        rows = _read(table, state, self._ids(keys), train, self.method)
        self._check_rows(rows, keys.tolist(), self.first[numbers])
        return BATCH

    def remove(self) -> int:
        """Removes given keys."""
        keys = self.pool[drawn(self.draw, REMOVED, self.keys)]
        slots = sorted({self.model.directory.find(key) for key in keys.tolist()} - {-1})
        gone, self.state = _remove(self.table, self.state, self._ids(keys), self.method)
        return self._removed(gone, slots)

    def remove_old(self) -> int:
        """Removes some of the keys that were not requested for a while."""
        age, size, model = int(self.draw.integers(1, 9)), self.sizes[-1] // 2, self.model
        gone, self.state = _remove_old(self.table, self.state, np.int32(age), size)
        entries = model.directory.entries().items()
        old = [slot for slot, entry in entries if model.now - entry[2] >= age]
        return self._removed(gone, sorted(old)[:size])

    def _removed(self, gone: Any, slots: list[int]) -> int:
        entries = [self.model.directory.entry(slot) for slot in slots]
        assert joined(gone.keys)[: len(slots)].tolist() == [entry[0] for entry in entries]
        self._check_evicted(gone, entries)
        self.model.directory.erase(slots)
        return len(slots)

    def grow(self) -> int:
        """Doubles the capacity if the load exceeds a half."""
        keys, before = len(self.model.rows), self.table.num_embeddings
        capacity = before
        self.table, self.state = jax_tt.dynamic.grow_if_full(self.table, self.state, max_load=0.5)
        while 2 * keys > capacity and capacity < self.sizes[-1]:
            self.model.double()
            capacity *= 2
        assert self.table.num_embeddings == capacity
        self.check()
        return keys if capacity > before else 0

    def age(self) -> int:
        """As many batches pass without a request that the next one has the last number."""
        now = self.model.now = max(self.model.now, LAST - 1)
        self.state = {**self.state, CLOCK: like_on_device(self.state[CLOCK], now)}
        return 0

    def dump(self) -> int:
        """A dump of all keys, or one of the changes since the last one."""
        if len(self.dumps) > 3:
            self.dumps = []
        base = self.dumps[-1] if self.dumps else None
        self.dumps.append(self._dumped(self.table, self.state, self.model, base))
        return len(self.model.rows)

    def _dumped(
        self, table: Any, state: Any, model: ModelTable, base: Dumped | None = None
    ) -> Dumped:
        name = f"keys-{next(self.files)}"
        # A table that is not sharded is one of each process.
        path = self.path / (name if is_sharded(table) else f"{name} of {jax.process_index()}")
        since, before = (base.path, base.content) if base else (None, Content({}, {}, {}, 0, {}))
        options: dict[str, Any] = {"rows_per_file": 200, "progress": False}
        with self._mesh_of(table):
            count = jax_tt.files.dump(table, state, path, since=since, **options)
        content, entries = model.content(), copy.deepcopy(model.directory.entries())
        changed = [
            key
            for key, entry in content.keys.items()
            if before.keys.get(key) != entry or (before.rows[key] != content.rows[key]).any()
        ]
        assert count == len(changed)
        return Dumped(path, set(changed), content, model.sizes, entries)

    def move(self) -> int:
        """Loads a dump and its changes into a table on other devices, and what that dumps into one as here."""
        devices, away, back = (
            int(self.draw.choice(some))
            for some in (self.others, 2 * np.array(self.sizes), self.sizes)
        )
        self.dump()
        there = self._loaded(self.dumps, devices, away)
        if there is None:
            return 0
        here = self._loaded([self._dumped(*there)], self.devices, back)
        if here is None:
            return 0
        self.table, self.state, self.model = here
        return 2 * len(self.model.rows)

    def _loaded(self, dumps: list[Dumped], devices: int, capacity: int) -> Any:
        """A new table with dumps, its state and what it should hold; None where there is no room."""
        table = self._table(devices, capacity)
        state, model = self._started(table), ModelTable(table)
        # Changes follow only where no key is missing.
        overflow = "evict" if len(dumps) == 1 else "error"
        with self._mesh_of(table):
            for dump in dumps:
                state = self._load(table, state, model, dump, dump.content, overflow)
                if state is None:
                    return None
        return table, state, model

    def merge(self) -> int:
        """Loads an earlier dump of all keys into the table as it is."""
        if not self.dumps:
            return self.dump()
        dump, expected = self.dumps[0], self.model.content().merged(self.dumps[0].content)
        after = self._load(self.table, self.state, self.model, dump, expected)
        if after is None:
            return 0
        self.state = after
        return len(dump.brought)

    def _load(
        self,
        table: Any,
        state: Any,
        model: ModelTable,
        dump: Dumped,
        expected: Content,
        overflow: str = "evict",
    ) -> Any:
        """The state with a dump; None where keys that find no room are an error."""
        same = dump.sizes == model.sizes and expected is dump.content
        held, kept = model.rows.keys(), expected if same else expected.kept(model)
        options = {"method": self.method, "progress": False, "overflow": overflow}
        try:
            counts, after = jax_tt.files.load_dump(table, state, dump.path, **options)
        except ValueError as error:
            assert "keys find no room" in str(error)
            assert len(kept.rows) < len(expected.rows)
            assert overflow == "error" or self.policy == "none"
            return None
        brought = dump.brought & kept.rows.keys()
        left = len((held | dump.brought) - kept.rows.keys())
        forgotten = len(expected.waiting) - len(kept.waiting) if model.sizes.waiting else 0
        assert counts == (len(brought), 0, left, forgotten)
        model.hold(kept, jax_tt.dynamic.keys_of(table, after), _waiting_of(after))
        if same:
            assert model.directory.entries() == dump.slots
        self._check(table, after, model)
        return after

    def check(self) -> None:
        """The whole table."""
        self._check(self.table, self.state, self.model)

    def _check(self, table: Any, state: Any, model: ModelTable) -> None:
        found = jax_tt.dynamic.keys_of(table, state)
        for entries, directory in (found, model.directory), (_waiting_of(state), model.waiting):
            listed = entries[["slot", "key", "score", "touched"]].tolist()
            assert {slot: rest for slot, *rest in listed} == directory.entries()
        assert int(state[CLOCK]) == model.now
        statistics = jax_tt.dynamic.statistics(table, state)
        assert {name: statistics[name] for name in model.totals} == model.totals
        rows, keys = on_host(state["embedding"])[found["slot"]], found["key"].tolist()
        assert model.rows.keys() == set(keys)
        expected = np.array([model.rows[key] for key in keys]).reshape(-1, D)
        np.testing.assert_array_equal(rows, expected)

    def _check_rows(self, rows: Any, keys: list[int], first: np.ndarray) -> None:
        expected = [self.model.rows.get(key, own) for key, own in zip(keys, first, strict=True)]
        np.testing.assert_array_equal(on_host(rows), np.array(expected))

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
            np.testing.assert_array_equal(row, self.model.rows.pop(key))


def _waiting_of(state: Any) -> np.ndarray:
    """The keys that wait for admission, those of tables that admit all of them."""
    if WAITING[0] not in state:
        return np.zeros(0, ENTRY)
    return entries_of(directory_of(state, WAITING))
