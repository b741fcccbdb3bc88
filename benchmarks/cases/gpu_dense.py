"""Dense tables on a GPU: a fused step of few and of many ids."""

from benchmarks.gpu import work
from benchmarks.gpu.measure import DENSE, PEAK_BYTES, measure_dense
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case(
    "gpu_dense", "GPU: dense table, 11,000,000 x 64, 10,240 and 1,024,000 ids: SGD step", gpu=True
)
def run(settings: Settings, report: Report) -> None:
    works = work.dense(settings.quick)
    timings = measure_dense(works, settings, report)
    for name, own in works.items():
        step = timings[f"{name}, uniform", DENSE].median
        # Of every id: its number, its row for the lookup, and its row read and written by the step.
        moved = own.nnz * (4 + 3 * 4 * own.shape.features)
        report.figure(f"{name} ms", 1e3 * step, "ms", f"{name}: fused step, uniform ids")
        report.figure(
            f"{name} bandwidth",
            moved / step / PEAK_BYTES,
            "",
            f"{name}: share of an H200's bandwidth",
            at_least=0.6 if own.nnz > 1_000_000 else None,
        )
