"""Tables of 64-bit keys: search against a hash map in C++, and the parts of a step against a static table's step."""

import gc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_tt
from benchmarks.contenders import ours, robin_map
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from benchmarks.work import LEARNING_RATE, Work
from jax_tt import optimizers
from jax_tt._hash import backend
from jax_tt._hash.directory import Eviction, KeyDirectory, init_directory
from jax_tt._hash.initial import Normal

LOADS = (0.5, 0.75, 1.0)
WAYS = 8
FIND, MAP = "jax_tt find", "tsl::robin_map find"
STATIC, STEP = "jax_tt fused step, static table", "jax_tt step with keys"


@case("hash", "Table of 1,000,000 x 64 with 64-bit keys, 10,240 keys a batch: find, insert, step")
def measure(settings: Settings, report: Report) -> None:
    capacity, n = (2048, 64) if settings.quick else (1_000_000, 10_240)
    work = Work.make(jax_tt.TTShape.suggest(capacity, 64, ranks=8), n // 20, 20)
    for load in LOADS:
        _search(settings, report, capacity, n, load)
    _step(settings, report, work)


def words(keys: np.ndarray) -> jax.Array:
    """uint64 ``[n]`` as uint32 ``[n, 2]``."""
    return jnp.asarray(np.stack([keys >> np.uint64(32), keys], -1).astype(np.uint32))


def filled(keys: np.ndarray, capacity: int) -> KeyDirectory:
    """A directory of keys in sets of `WAYS`; those for which there is no place are left out."""
    n = keys.size
    zeros, now, epoch = jnp.zeros((n, 2), jnp.uint32), jnp.int32(1), jnp.uint32(0)
    batch = words(keys), jnp.ones(n, bool), zeros, now, epoch
    return backend.insert(init_directory(capacity // WAYS, WAYS), *batch, Eviction("none"), "auto")[
        0
    ]


def _search(settings: Settings, report: Report, capacity: int, n: int, load: float) -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(2**64, size=int(load * capacity), dtype=np.uint64)
    directory, library = filled(keys, capacity), robin_map.compiled()
    asked = [rng.choice(keys, n) for _ in range(10)]
    batches, present = [words(batch) for batch in asked], jnp.ones(n, bool)
    find = jax.jit(lambda directory, batch, here: backend.find(directory, batch, here, "auto"))
    label = f"load {load}"
    calls: dict[tuple[str, str], Call] = {
        (label, FIND): lambda i: find(directory, batches[i % 10], present).block_until_ready()
    }
    if library is None:
        report.note("there is no C++ compiler, so tsl::robin_map was not timed")
    else:
        rival, rows = robin_map.RobinMap(library, keys), np.empty(n, np.int32)
        calls[label, MAP] = lambda i: rival.find(asked[i % 10], rows)
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    if library is not None:
        ratio = timings[label, MAP].median / timings[label, FIND].median
        meaning = f"find faster than tsl::robin_map with two threads, {label}"
        report.figure(f"find_speedup_load_{load}", ratio, "x", meaning, at_least=1)


def _step(settings: Settings, report: Report, work: Work) -> None:
    rng = np.random.default_rng(1)
    capacity = work.shape.num_embeddings
    keys = rng.integers(2**64, size=int(0.75 * capacity), dtype=np.uint64)
    batches = [words(rng.choice(keys, work.nnz)) for _ in range(10)]
    calls = {
        ("uniform", STATIC): ours.dense_fused_step(work),
        ("uniform", STEP): _with_keys(work, filled(keys, capacity), batches),
    }
    timings = interleave(calls, settings.budget)
    del calls
    gc.collect()
    report.timings(timings)
    ratio = timings["uniform", STEP].median / timings["uniform", STATIC].median
    meaning = "time of a step with keys that are all present, over that of the static table"
    report.figure("step_over_static", ratio, "x", meaning, at_most=1.5)


def _with_keys(work: Work, directory: KeyDirectory, batches: list[jax.Array]) -> Call:
    """Find or insert, initial rows of the new keys, and the fused step of the rows in their slots.

    The number of the batch is in the state, as in that of a `HashTable`.
    """
    rule, distribution, n = optimizers.SGD(LEARNING_RATE), Normal(0.01), work.nnz
    seed, gradient = jnp.array([0, 1], jnp.uint32), jnp.asarray(work.gradient)
    rows = jnp.full((directory.capacity, work.shape.features), 0.01, jnp.float32)
    offsets = jnp.asarray(work.offsets, jnp.int32)

    def loss(table: jax_tt.FusedTable, slots: jax.Array) -> jax.Array:
        return jnp.vdot(jax_tt.fused_embed_bag(table, jax_tt.Bags(slots, offsets), rule), gradient)

    def step(state: tuple, keys: jax.Array) -> tuple[jax.Array, tuple]:
        directory, now, table = state
        now += 1
        given = jnp.zeros((n, 2), jnp.uint32)
        batch = keys, jnp.ones(n, bool), given, now, jnp.uint32(0)
        directory, done = backend.insert(directory, *batch, Eviction("lru"), "auto")
        new = done.slots < directory.capacity
        fresh = backend.initial(
            distribution, seed, done.keys, new, work.shape.features, jnp.float32, "auto"
        )
        cores, _ = backend.exchange(table.cores, [fresh], done.slots, "auto", return_old=False)
        slots = backend.find(directory, keys, jnp.ones(n, bool), "auto")
        value, table = jax.value_and_grad(loss)(table._replace(cores=tuple(cores)), slots)
        return value, (directory, now, table)

    run: Callable = jax.jit(step, donate_argnums=0)
    state = directory, jnp.int32(1), jax_tt.init_fused_table(rows, rule)

    def call(i: int) -> object:
        nonlocal state
        value, state = run(state, batches[i % len(batches)])
        return jax.block_until_ready((value, state))

    return call
