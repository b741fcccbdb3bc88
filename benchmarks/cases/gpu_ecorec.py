"""The shapes of EcoRec on a GPU: rank 32, few columns, many ids."""

from benchmarks.gpu import work
from benchmarks.gpu.measure import measure, over_floor
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("gpu_ecorec", "GPU: TT tables of EcoRec, 32 columns, rank 32, 2,048 to 131,072 ids", gpu=True)
def run(settings: Settings, report: Report) -> None:
    works = work.ecorec(settings.quick)
    over_floor(works, measure(works, settings, report), report)
