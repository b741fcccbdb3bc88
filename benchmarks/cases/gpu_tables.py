"""The 26 tables of Criteo on a GPU, in one call: all dense, and the largest as tensor trains."""

from benchmarks.gpu import kernels, tables
from benchmarks.gpu.measure import NO_COMMAND_BUFFERS, measure, report_kernels
from benchmarks.gpu.timing import Called, Replayed
from benchmarks.registry import Settings, case
from benchmarks.results import Report

TOGETHER = "jax_tt collection"


@case("gpu_tables", "GPU: 26 tables of Criteo's sizes, row-wise Adagrad, 2,048 samples", gpu=True)
def run(settings: Settings, report: Report) -> None:
    # The mixed ones first, which the model expects a time for.
    for label, work in reversed(tables.works(settings.quick).items()):
        makers = {
            TOGETHER: lambda work=work: Replayed(*work.together()),
            f"{TOGETHER}, called from Python, no command buffers": lambda work=work: Called(
                *work.together(), options=NO_COMMAND_BUFFERS
            ),
            "jax_tt, an op for each table": lambda work=work: Replayed(*work.one_by_one()),
        }
        timings = measure(label, work, makers, settings, report)
        for (name, contender), value in timings.items():
            if contender == TOGETHER:
                bound = 0.25 if "tensor trains" in name and "uniform" in name else None
                report.figure(
                    f"{name} ms", 1e3 * value.median, "ms", f"{name}: step", at_most=bound
                )
        report_kernels(label, work.together(), work, kernels.MIXED_STAGES, report)
