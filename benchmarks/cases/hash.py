"""Tables of 64-bit keys: search against a hash map in C++, steps against those of other tables, and growth."""

import gc
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.contenders import robin_map
from benchmarks.contenders.hashed import bags_of, filled
from benchmarks.ids import STREAMS
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, Timing, interleave
from benchmarks.work import LEARNING_RATE
from jax_tt._kinds.hashed.table import directory_of
from jax_tt._native import hash_backend
from jax_tt._table.state import SCALARS

LOADS, COLUMNS, NARROW, TABLES = (0.5, 0.75, 1.0), 64, 16, 26
FIND, MAP = "jax_tt find", "tsl::robin_map find"
STATIC, STEP = "jax_tt step, static tables", "jax_tt step with keys"
MANY, ONE = "jax_tt step, many tables", "jax_tt step, one table"


@case("hash", "Tables of 1,000,000 x 64 with 64-bit keys, 10,240 keys a batch: find, step, growth")
def measure(settings: Settings, report: Report) -> None:
    rows, bags = (2048, (8, 8)) if settings.quick else (1_000_000, (512, 20))
    for load in LOADS:
        _search(settings, report, rows, bags[0] * bags[1], load)
    _step(settings, report, 1, rows, bags)
    _step(settings, report, TABLES, rows // 10 // 8 * 8, bags)
    for samples in (8, 16) if settings.quick else (128, 2048):
        _of_one_table(settings, report, 256 if settings.quick else 16_384, samples)
    _growth(report, rows)


def words(keys: np.ndarray) -> jax.Array:
    """uint64 ``[n]`` as uint32 ``[n, 2]``."""
    return jnp.asarray(np.stack([keys >> np.uint64(32), keys], -1).astype(np.uint32))


def _search(settings: Settings, report: Report, capacity: int, n: int, load: float) -> None:
    # At load 1 an update of the policy would evict keys; those without a place are not asked for.
    table = jax_tt.hash_table(capacity, 1, policy="none", safe_check="ignore")
    state, held = filled(table, load)
    keys = np.ascontiguousarray(held["key"])
    directory, library = directory_of(state), robin_map.compiled()
    if library is None:
        report.note(
            "tsl::robin_map was not timed: it needs a C++ compiler, and its header in nanobind"
        )
    rival, found = None if library is None else robin_map.RobinMap(library, keys), np.empty(n, "i4")
    present = jnp.ones(n, bool)
    find = jax.jit(lambda directory, batch, here: hash_backend.find(directory, batch, here, "auto"))
    for stream, draw in STREAMS.items():
        rng = np.random.default_rng(1)
        asked = [keys[draw(rng, keys.size, n)] for _ in range(10)]
        batches, label = [words(batch) for batch in asked], f"load {load}, {stream}"

        def own(i: int, batches: list[jax.Array] = batches) -> object:
            return find(directory, batches[i % 10], present).block_until_ready()

        calls: dict[tuple[str, str], Call] = {(label, FIND): own}
        if rival is not None:
            calls[label, MAP] = lambda i, asked=asked: rival.find(asked[i % 10], found)
        timings = interleave(calls, settings.budget)
        report.timings(timings)
        if rival is not None:
            ratio = timings[label, MAP].median / timings[label, FIND].median
            meaning = f"find faster than tsl::robin_map with two threads, {label}"
            report.figure(f"find_speedup_{load}_{stream}", ratio, "x", meaning, at_least=1)


def _step(settings: Settings, report: Report, count: int, rows: int, bags: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    rule, names = jax_tt.optimizers.SGD(LEARNING_RATE), [f"table_{k}" for k in range(count)]
    features = {name: jax_tt.Feature(name) for name in names}
    gradient = 1e-3 * rng.standard_normal((bags[0], count * COLUMNS), np.float32)
    dense = jax_tt.dense_table(rows, COLUMNS, optimizer=rule)
    static = jax_tt.Collection(dict.fromkeys(names, dense), features)
    ids = [
        {n: bags_of(rng.integers(rows, size=bags).astype(np.int32)) for n in names}
        for _ in "0" * 10
    ]
    hashed = jax_tt.hash_table(rows, COLUMNS, optimizer=rule)
    dynamic = jax_tt.Collection(dict.fromkeys(names, hashed), features)
    state, held = filled(hashed, 0.75)
    batches = [
        {n: bags_of(jax_tt.dynamic.split_keys(rng.choice(held["key"], bags))) for n in names}
        for _ in "0" * 10
    ]
    arrays = {name: x for name, x in state.items() if name not in SCALARS}
    start = dynamic.init(jax.random.key(0))
    start = dynamic.replaced(start, {n: jax.tree.map(jnp.copy, arrays) for n in names})
    work = f"{count} table{'s' * (count > 1)} of {rows:,} rows"
    calls = {
        (work, STATIC): _training(static, static.init(jax.random.key(0)), ids, gradient),
        (work, STEP): _training(dynamic, start, batches, gradient),
    }
    del start, state, arrays
    timings = interleave(calls, settings.budget)
    del calls
    gc.collect()
    report.timings(timings)
    ratio = timings[work, STEP].median / timings[work, STATIC].median
    meaning = f"time of a step with keys that are all present, over that of static tables, {work}"
    report.figure(f"step_over_static_{count}", ratio, "x", meaning, at_most=1.5)


def _of_one_table(settings: Settings, report: Report, rows: int, samples: int) -> None:
    """A step that inserts into many tables, and one into a single table of as many rows with the same features."""
    rule, features = jax_tt.optimizers.SGD(LEARNING_RATE), [f"table_{k}" for k in range(TABLES)]
    gradient = np.full((samples, TABLES * NARROW), 1e-3, np.float32)
    draws = np.random.default_rng(1).zipf(1.2, (10, TABLES, samples, 1)) % (rows // 2)
    work, calls = f"{TABLES} tables of {rows:,} x {NARROW}, {samples:,} samples", {}
    for label, tables in ((MANY, features), (ONE, ["table"])):
        of_all = jax_tt.hash_table(rows * TABLES // len(tables), NARROW, optimizer=rule)
        collection = jax_tt.Collection(
            dict.fromkeys(tables, of_all),
            {n: jax_tt.Feature(tables[k % len(tables)]) for k, n in enumerate(features)},
        )
        # In one table, the keys of another feature are other keys.
        apart = 0 if len(tables) > 1 else rows
        batches = [
            {
                n: jax_tt.dynamic.split_keys(keys + k * apart)
                for k, (n, keys) in enumerate(zip(features, draw, strict=True))
            }
            for draw in draws
        ]
        calls[work, label] = _training(
            collection, collection.init(jax.random.key(0)), jax.device_put(batches), gradient
        )
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    ratio = timings[work, MANY].median / timings[work, ONE].median
    meaning = f"time of a step that inserts, over that with one table of as many rows, {work}"
    report.figure(f"step_over_one_table_{samples}", ratio, "x", meaning, at_most=1.5)


def _training(collection: jax_tt.Collection, state: Any, batches: list[Any], g: np.ndarray) -> Call:
    """Steps of a collection; where it has hash tables, with an insertion and the slots that it finds."""
    hashed = any(table.ids.takes_keys for table in collection.tables.values())

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        if hashed:
            inserted, state = jax_tt.dynamic.insert(collection, state, batch)
            batch = jax_tt.dynamic.with_slots(batch, inserted)

        def loss(own: Any) -> jax.Array:
            arrays = collection.replaced(state, own)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch, layout="concatenated")
            return jnp.vdot(rows, g)

        value, gradients = jax.value_and_grad(loss)(collection.trained(state))
        return collection.overwritten(state, gradients)[0], value

    def call(i: int) -> object:
        nonlocal state
        state, value = step(state, batches[i % len(batches)])
        return jax.block_until_ready((value, state))

    return call


def _growth(report: Report, rows: int) -> None:
    rule = jax_tt.optimizers.SGD(LEARNING_RATE)
    table = jax_tt.hash_table(rows, COLUMNS, optimizer=rule, max_capacity=2 * rows)
    state, _ = filled(table, 0.75)
    seconds = []
    for _ in range(6):  # the first one compiles
        begin = time.perf_counter()
        grown, after = jax_tt.dynamic.grow_if_full(table, state, max_load=0.5)
        jax.block_until_ready(after)
        seconds.append(time.perf_counter() - begin)
        assert grown.num_embeddings == 2 * rows
        del after
    work = f"{rows:,} rows to twice as many"
    report.timings({(work, "jax_tt grow_if_full"): Timing.of(seconds[1:])})
    median = Timing.of(seconds[1:]).median
    report.figure("growth", median, "s", f"growth of a table of {work}", at_most=0.5)
