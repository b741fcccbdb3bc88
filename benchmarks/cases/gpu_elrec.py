"""The shapes of EL-Rec on a GPU: rank 128."""

from benchmarks.gpu import work
from benchmarks.gpu.measure import measure, over_floor
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("gpu_elrec", "GPU: TT tables of EL-Rec, 64 columns, rank 128, 4,096 to 8,192 ids", gpu=True)
def run(settings: Settings, report: Report) -> None:
    works = work.elrec(settings.quick)
    over_floor(works, measure(works, settings, report), report)
