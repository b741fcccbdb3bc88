"""The headline table with 2, 3 and 4 cores."""

from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.sweep import sweep
from benchmarks.work import HEADLINE_BAG_SIZE, HEADLINE_BAGS, Work
from jax_tt import TTShape


@case("sweep_cores", "TT table, 11,000,000 x 64, rank 32, 512 bags x 20 ids: number of cores")
def measure(settings: Settings, report: Report) -> None:
    rows, bags, size = 11_000_000, HEADLINE_BAGS, HEADLINE_BAG_SIZE
    if settings.quick:
        rows, bags, size = 10_000, 16, 4
    shapes = {f"d = {d}": TTShape.suggest(rows, 64, ranks=32, d=d) for d in (2, 3, 4)}
    sweep(settings, report, {name: Work.make(s, bags, size) for name, s in shapes.items()})
