"""The 26 tables of Criteo on a GPU, in one call: all dense, and the largest as tensor trains."""

from benchmarks.gpu import tables, timing
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Timing


@case("gpu_tables", "GPU: 26 tables of Criteo's sizes, row-wise Adagrad, 2,048 samples", gpu=True)
def run(settings: Settings, report: Report) -> None:
    rounds = 2 if settings.quick else 7
    timings: dict[tuple[str, str], Timing] = {}
    for label, work in tables.works(settings.quick).items():
        calls = {
            "jax_tt collection": timing.Replayed(*work.together()),
            "jax_tt, an op for each table": timing.Replayed(*work.one_by_one()),
        }
        for stream in ("uniform", "zipf"):
            found = timing.interleave(calls, work, stream, rounds)
            timings |= {(f"{label}, {stream}", name): value for name, value in found.items()}
        del calls
    report.timings(timings)
    for (label, name), value in timings.items():
        if name == "jax_tt collection":
            bound = 0.25 if "tensor trains" in label and "uniform" in label else None
            report.figure(f"{label} ms", 1e3 * value.median, "ms", f"{label}: step", at_most=bound)
