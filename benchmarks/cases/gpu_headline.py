"""The headline batch on a GPU, with uniform and with Zipf ids."""

from benchmarks.gpu import contenders, kernels, stages, work
from benchmarks.gpu.measure import (
    BACKWARD,
    CALLED,
    FORWARD,
    FUSED,
    floor_seconds,
    measure,
    references,
    report_error,
    report_stages,
    trains,
)
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case(
    "gpu_headline",
    "GPU: TT table, 11,000,000 x 64, rank 32, 512 bags x 20 ids: forward, backward, SGD",
    gpu=True,
)
def run(settings: Settings, report: Report) -> None:
    headline = work.headline(settings.quick)
    report.note(
        "forward, and forward + backward, add their results to a sum; the loop alone adds one id"
    )
    timings = measure("", headline, trains(headline), settings, report)
    step, floor = timings["uniform", FUSED].median, floor_seconds(headline, settings)
    report.figure("forward_ms", 1e3 * timings["uniform", FORWARD].median, "ms", "forward")
    report.figure(
        "gradient_ms", 1e3 * timings["uniform", BACKWARD].median, "ms", "forward and backward"
    )
    report.figure("step_ms", 1e3 * step, "ms", "fused step, uniform ids", at_most=0.1)
    report.figure(
        "called_ms", 1e3 * timings["uniform", CALLED].median, "ms", "fused step, called from Python"
    )
    report.figure("floor_ms", 1e3 * floor, "ms", "floor of a step on this card")
    report.figure("over_floor", step / floor, "x", "fused step over the floor")
    report.figure(
        "zipf_over_uniform",
        timings["zipf", FUSED].median / step,
        "",
        "fused step with Zipf ids over the same with uniform ids",
    )
    model = kernels.TRAIN_STAGES, stages.stages(headline)
    fused = contenders.tt_fused(headline, "auto")
    report_stages("headline", fused, headline, model, report)
    report_error("headline", headline, report)
    measure("", headline, references(headline), settings, report)
