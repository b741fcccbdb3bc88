"""Dense tables on a GPU: a fused step of few and of many ids."""

from benchmarks.gpu import contenders, kernels, peaks, stages, work
from benchmarks.gpu.measure import (
    DENSE,
    DENSE_FORWARD,
    dense,
    dense_in_flax,
    dense_in_torch,
    measure,
    report_stages,
)
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case(
    "gpu_dense", "GPU: dense table, 11,000,000 x 64, 10,240 and 1,024,000 ids: SGD step", gpu=True
)
def run(settings: Settings, report: Report) -> None:
    card = peaks.of_this_card(settings.quick)
    for name, own in work.dense(settings.quick).items():
        timings = measure(name, own, dense(own), settings, report)
        step = timings[f"{name}, uniform", DENSE].median
        # Of every id: its number, its row for the lookup, and its row read and written by the step.
        moved = own.nnz * (4 + 3 * 4 * own.shape.features)
        forward = timings[f"{name}, uniform", DENSE_FORWARD].median
        report.figure(f"{name} forward ms", 1e3 * forward, "ms", f"{name}: forward, uniform ids")
        report.figure(f"{name} ms", 1e3 * step, "ms", f"{name}: fused step, uniform ids")
        report.figure(
            f"{name} bandwidth",
            moved / step / card.bytes,
            "",
            f"{name}: share of the bandwidth of a copy on this card",
            at_least=0.6 if own.nnz > 1_000_000 else None,
        )
        model = kernels.DENSE_STAGES, stages.dense_stages(own)
        fused = contenders.dense_fused(own, "auto")
        report_stages(name, fused, own, model, report)
        del fused  # gigabytes
    for name, own in work.dense(settings.quick).items():
        measure(name, own, dense_in_torch(own, report), settings, report)
        measure(name, own, dense_in_flax(own), settings, report)
