"""The headline table with batches of 32 to 500,000 ids."""

from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.sweep import sweep
from benchmarks.work import HEADLINE_SHAPE, Work

# (bags, ids in a bag)
BATCHES = ((2, 16), (32, 16), (256, 16), (512, 20), (4096, 16), (25_000, 20))


@case("sweep_batch", "TT table, 11,000,000 x 64, rank 32: ids in a batch")
def measure(settings: Settings, report: Report) -> None:
    batches = BATCHES[:2] if settings.quick else BATCHES
    works = {f"{b * n:,} ids": Work.make(HEADLINE_SHAPE, b, n) for b, n in batches}
    sweep(settings, report, works)
