"""The headline batch with Zipf ids on a GPU."""

from benchmarks.gpu import contenders, timing, work
from benchmarks.gpu.measure import FUSED, measure
from benchmarks.registry import Settings, case
from benchmarks.results import Report


@case(
    "gpu_headline_zipf", "GPU: the headline batch with Zipf ids: forward, backward, SGD", gpu=True
)
def run(settings: Settings, report: Report) -> None:
    headline = work.headline(settings.quick)
    zipf = measure({"headline": headline}, settings, report, streams=("zipf",))["zipf", FUSED]
    fused = {FUSED: timing.Replayed(*contenders.tt_fused(headline, "auto"))}
    rounds = 2 if settings.quick else 7
    uniform = timing.interleave(fused, headline, "uniform", rounds)[FUSED]
    report.timings({("uniform", FUSED): uniform})
    report.figure("step_ms", 1e3 * zipf.median, "ms", "fused step, Zipf ids")
    report.figure(
        "zipf_over_uniform",
        zipf.median / uniform.median,
        "",
        "fused step with Zipf ids over the same with uniform ids",
    )
