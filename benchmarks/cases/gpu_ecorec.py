"""A shape of EcoRec on a GPU: rank 32, few columns, many ids."""

from benchmarks.gpu import work
from benchmarks.gpu.measure import over_floor
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("gpu_ecorec", "GPU: TT table of EcoRec, 32 columns, rank 32, 16,384 ids", gpu=True)
def run(settings: Settings, report: Report) -> None:
    name, own = work.middle(work.ecorec(settings.quick))
    over_floor({name: own}, settings, report)
