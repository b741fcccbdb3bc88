"""Training through tiers: a stream of ids of which most are rare and the popular ones drift."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

import jax_tt
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Timing

EXPONENT, DRIFT = 1.2, 20


@case("tiers", "row-wise Adagrad, D 64, 100,000,000 ids: rows on the device, in memory and on disk")
def measure(settings: Settings, report: Report) -> None:
    if settings.quick:
        return _measure(report, 512, 1024, 40, (16, 8))
    # With 1 GiB on the device, all ids of the stream find room there; with 64 MiB they do not, nor in host memory.
    for rows, host in ((4 << 20, 1 << 19), (1 << 18, 1 << 18)):
        _measure(report, rows, host, 1000, (512, 20))


def _measure(report: Report, rows: int, host: int, batches: int, shape: tuple[int, int]) -> None:
    warm, size = batches // 2, f"{rows * 260 / 2**20:,.0f} MiB"
    table = jax_tt.dense_table(rows, 64, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.05))
    collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    step = _step(collection)
    state = collection.init(jax.random.key(0))
    stream = list(_stream(batches, shape))
    directory = tempfile.mkdtemp()
    try:
        tier = jax_tt.Tier(host_rows=host)
        with jax_tt.Tiers(collection, {"item": tier}, path=directory) as tiers:
            times, start, waited, before = [], 0.0, 0.0, tiers.statistics()["item"]
            iteration = tiers.prefetch({"item": ids} for ids in stream)
            for k, staged in enumerate(iteration):
                if k == warm:
                    waited, before = tiers.seconds_waited, tiers.statistics()["item"]
                    start = time.perf_counter()
                begin = time.perf_counter()
                state = step(tiers.load(state, staged), staged.batch)
                # The device is done before the next rows are asked for, so that only waits for rows are counted.
                jax.block_until_ready(state)
                times.append(time.perf_counter() - begin)
            whole, waited = time.perf_counter() - start, tiers.seconds_waited - waited
            after = tiers.statistics()["item"]
    finally:
        shutil.rmtree(directory)
    counts = after._replace(**{k: v - getattr(before, k) for k, v in after._asdict().items()})
    alone = []
    for k in range(batches // 4):
        ids = {"item": np.random.default_rng(k).integers(0, rows, stream[0].shape)}
        begin = time.perf_counter()
        state = step(state, ids)
        jax.block_until_ready(state)
        alone.append(time.perf_counter() - begin)
    work = f"{stream[0].size:,} ids, {size} on the device"
    report.timings(
        {
            (work, "exchange of rows, and step"): Timing.of(times[warm:]),
            (work, "step alone, all rows on the device"): Timing.of(alone[len(alone) // 4 :]),
        }
    )
    last = batches - warm
    figures = (
        ("waited", 100 * waited / whole, "%", "time that steps wait for rows"),
        ("whole", 1e3 * whole / last, "ms", "time a batch, waits included"),
        (
            "device",
            100 * counts.device_hits / counts.requests,
            "%",
            "ids whose row is on the device",
        ),
        ("host", counts.host_hits / last, "", "rows a batch from host memory"),
        ("disk", counts.disk_hits / last, "", "rows a batch from disk"),
        ("created", counts.created / last, "", "new rows a batch"),
        (
            "moved",
            260 * (counts.loaded + counts.evicted) / last / 2**20,
            "MiB",
            "rows moved a batch",
        ),
    )
    for name, value, unit, meaning in figures:
        bound = {"at_most": 20.0} if name == "waited" else {}
        report.figure(f"{name}_{rows}", value, unit, f"{size}: {meaning}", **bound)


def _stream(batches: int, shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Ids whose popularity falls as a power of their rank, and whose ranks drift."""
    draw = np.random.default_rng(0)
    power = 1.0 - EXPONENT
    for k in range(batches):
        ranks = (1.0 + draw.random(shape) * (1e8**power - 1.0)) ** (1.0 / power)
        yield (ranks.astype(np.int64) + DRIFT * k) * 2654435761 % 2**62


def _step(collection: jax_tt.Collection) -> Any:
    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        def loss(trained: Any) -> Any:
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.embed_collection(collection, arrays, batch)
            return (rows["item"] ** 2).sum()

        gradients = jax.grad(loss)(collection.trained(state))
        return collection.overwritten(state, gradients)[0]

    return step
