"""The headline batch with rows of 16 to 128 columns."""

from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.sweep import sweep
from benchmarks.work import HEADLINE_BAG_SIZE, HEADLINE_BAGS, HEADLINE_SHAPE, Work
from jax_tt import TTShape

COLUMNS = {16: (2, 2, 4), 32: (2, 4, 4), 64: (4, 4, 4), 128: (4, 4, 8)}


@case("sweep_features", "TT table, 11,000,000 rows, rank 32, 512 bags x 20 ids: columns")
def measure(settings: Settings, report: Report) -> None:
    bags, size = (16, 4) if settings.quick else (HEADLINE_BAGS, HEADLINE_BAG_SIZE)
    rows = HEADLINE_SHAPE.row_factors
    works = {
        f"D = {width}": Work.make(TTShape(11_000_000, width, 32, rows, factors), bags, size)
        for width, factors in COLUMNS.items()
    }
    sweep(settings, report, works)
