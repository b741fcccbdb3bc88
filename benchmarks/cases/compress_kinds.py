"""Processor time that `compress` takes for each kind."""

import time

import numpy as np

import jax_tt
from benchmarks.registry import Settings, case
from benchmarks.results import Report

_KINDS = ("quantized", "mixed", "product", "additive", "low_rank", "tt", "tt_sum")


@case("compress_kinds", "compress to a tenth of the bytes: processor time by kind")
def measure(settings: Settings, report: Report) -> None:
    n, features = 1_000 if settings.quick else 20_000, 32
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(n // 50, features))
    rows = centers[rng.integers(len(centers), size=n)] + 0.3 * rng.normal(size=(n, features))
    rows = rows.astype(np.float32)
    for kind in _KINDS:
        start = time.process_time()
        found = jax_tt.compress(rows, kind=kind, max_bytes=rows.nbytes // 10, progress=False)
        seconds = time.process_time() - start
        meaning = (
            f"{kind}, {n:,} x {features}, quality {found.chosen.quality:.3f}, with compilation"
        )
        report.figure(kind, seconds, "s", meaning)
