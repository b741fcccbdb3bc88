"""Training through tiers: a stream of ids of which most are rare and the popular ones drift."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_tt
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Timing

KEYS, DRIFT = 100_000_000, 20


@case(
    "tiers", "row-wise Adagrad, D 64, 100,000,000 keys: rows on the device, in memory and on disk"
)
def measure(settings: Settings, report: Report) -> None:
    if settings.quick:
        return _measure(report, Size(512, 1024, 4096, 1.1), 40, (16, 8))
    # Of Zipf's law with these exponents, nine of ten requests are for rows that find room on the device.
    _measure(report, Size(3_900_000, 500_000, 8_000_000, 1.07), 1000, (512, 20))
    _measure(report, Size(250_000, 250_000, 2_000_000, 1.14), 1000, (512, 20))


class Size(NamedTuple):
    """Rows on the device, in host memory and in all before the stream begins, and the exponent of its popularity."""

    device: int
    host: int
    live: int
    exponent: float


def _measure(report: Report, size: Size, batches: int, shape: tuple[int, int]) -> None:
    mib = f"{size.device * 260 / 2**20:,.0f} MiB"
    rule = jax_tt.optimizers.RowWiseAdagrad(0.05)
    table = jax_tt.dense_table(size.device, 64, optimizer=rule, takes_slots=True)
    collection = jax_tt.Collection({"item": table}, {"item": jax_tt.Feature("item")})
    step = _step(collection)
    state = collection.init(jax.random.key(0))
    stream = list(_stream(batches, shape, size.exponent))
    warm = batches // 5
    directory = tempfile.mkdtemp()
    try:
        tier = jax_tt.Tier(host_rows=size.host)
        with jax_tt.Tiers(collection, {"item": tier}, path=directory) as tiers:
            # All tiers are full before the stream begins, as after days of training.
            for staged in tiers.prefetch(_before(size.live, shape)):
                state = step(tiers.load(state, staged), staged.batch)
            times, start, waited, before = [], 0.0, 0.0, tiers.statistics()["item"]
            for k, staged in enumerate(tiers.prefetch({"item": ids} for ids in stream)):
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
        slots = np.random.default_rng(k).integers(0, size.device, stream[0].shape, np.int32)
        begin = time.perf_counter()
        state = step(state, {"item": jax_tt.pipeline.Slots(slots)})
        jax.block_until_ready(state)
        alone.append(time.perf_counter() - begin)
    work = f"{stream[0].size:,} ids, {mib} on the device"
    report.timings(
        {
            (work, "exchange of rows, and step"): Timing.of(times[warm:]),
            (work, "step alone, all rows on the device"): Timing.of(alone[len(alone) // 4 :]),
        }
    )
    last, moved = batches - warm, after.record_bytes * (counts.loaded + counts.evicted)
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
        ("to_disk", counts.to_disk / last, "", "rows a batch to disk"),
        ("moved", moved / last / 2**20, "MiB", "rows moved a batch"),
    )
    for name, value, unit, meaning in figures:
        bound = {"at_most": 20.0} if name == "waited" else {}
        report.figure(f"{name}_{size.device}", value, unit, f"{mib}: {meaning}", **bound)


def _before(live: int, shape: tuple[int, int]) -> Iterator[dict[str, np.ndarray]]:
    """Every key that has a row when the stream begins, the least popular ones first."""
    count = shape[0] * shape[1]
    for first in range(live, 0, -count):
        yield {"item": _keys(np.maximum(first - np.arange(count), 1).reshape(shape))}


def _stream(batches: int, shape: tuple[int, int], exponent: float) -> Iterator[np.ndarray]:
    """Keys whose popularity falls as a power of their rank, and whose ranks drift."""
    draw = np.random.default_rng(0)
    power = 1.0 - exponent
    for k in range(batches):
        ranks = (1.0 + draw.random(shape) * (float(KEYS) ** power - 1.0)) ** (1.0 / power)
        yield _keys(ranks.astype(np.int64) + DRIFT * k)


def _keys(ranks: np.ndarray) -> np.ndarray:
    return ranks * 2654435761 % 2**62


def _step(collection: jax_tt.Collection) -> Any:
    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        def loss(trained: Any) -> Any:
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return (rows["item"] ** 2).sum()

        gradients = jax.grad(loss)(collection.trained(state))
        return collection.overwritten(state, gradients)[0]

    return step
