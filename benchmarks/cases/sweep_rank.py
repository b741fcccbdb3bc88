"""The headline batch at ranks 8 to 128."""

from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.sweep import sweep
from benchmarks.work import HEADLINE_BAG_SIZE, HEADLINE_BAGS, HEADLINE_SHAPE, Work
from jax_tt import TTShape

RANKS = (8, 16, 32, 64, 128)


@case("sweep_rank", "TT table, 11,000,000 x 64, 512 bags x 20 ids: rank")
def measure(settings: Settings, report: Report) -> None:
    rows, columns = HEADLINE_SHAPE.row_factors, HEADLINE_SHAPE.col_factors
    bags, size, ranks = HEADLINE_BAGS, HEADLINE_BAG_SIZE, RANKS
    if settings.quick:
        bags, size, ranks = 16, 4, RANKS[:2]
    works = {
        f"r = {r}": Work.make(TTShape(11_000_000, 64, r, rows, columns), bags, size) for r in ranks
    }
    sweep(settings, report, works)
