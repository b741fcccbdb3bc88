"""The headline batch on a GPU."""

from benchmarks.gpu import work
from benchmarks.gpu.measure import BACKWARD, CALLED, FORWARD, FUSED, floor_seconds, measure
from benchmarks.registry import Settings, case
from benchmarks.results import Report

# The figure that FBTT's README gives for forward, backward and SGD of this batch.
FBTT_MS = 4.26


@case(
    "gpu_headline",
    "GPU: TT table, 11,000,000 x 64, rank 32, 512 bags x 20 uniform ids: forward, backward, SGD",
    gpu=True,
)
def run(settings: Settings, report: Report) -> None:
    headline = work.headline(settings.quick)
    timings = measure({"headline": headline}, settings, report, streams=("uniform",))
    step = timings["uniform", FUSED].median
    floor = floor_seconds(headline)
    report.figure("forward_ms", 1e3 * timings["uniform", FORWARD].median, "ms", "forward")
    report.figure(
        "gradient_ms", 1e3 * timings["uniform", BACKWARD].median, "ms", "forward and backward"
    )
    report.figure("step_ms", 1e3 * step, "ms", "fused step, uniform ids", at_most=0.1)
    report.figure(
        "called_ms", 1e3 * timings["uniform", CALLED].median, "ms", "fused step, called from Python"
    )
    report.figure("floor_ms", 1e3 * floor, "ms", "floor of a step on an H200")
    report.figure("over_floor", step / floor, "x", "fused step over the floor")
    report.figure(
        "over_fbtt",
        FBTT_MS / (1e3 * step),
        "x",
        "fused step faster than FBTT's README",
        at_least=40,
    )
