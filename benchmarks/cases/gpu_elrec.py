"""A shape of EL-Rec on a GPU: rank 128."""

from benchmarks.gpu import work
from benchmarks.gpu.measure import over_floor
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case("gpu_elrec", "GPU: TT table of EL-Rec, 10M rows, 64 columns, rank 128, 4,096 ids", gpu=True)
def run(settings: Settings, report: Report) -> None:
    name, own = work.middle(work.elrec(settings.quick))
    over_floor({name: own}, settings, report)
