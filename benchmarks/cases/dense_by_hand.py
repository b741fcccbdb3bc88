"""One training step of a dense table against the same step written by hand in plain JAX."""

import gc

from benchmarks.contenders import by_hand, ours
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import interleave
from benchmarks.work import LEARNING_RATE, Work
from jax_tt import optimizers

OURS, BY_HAND = "jax_tt fused step", "plain JAX step by hand"
RULES = {
    "SGD": (optimizers.SGD(LEARNING_RATE), by_hand.sgd_step),
    "row-wise Adagrad": (optimizers.RowWiseAdagrad(LEARNING_RATE), by_hand.rowwise_adagrad_step),
}


@case("dense_by_hand", "Dense table, 11,000,000 x 64, 512 bags x 20 ids: step in plain JAX")
def measure(settings: Settings, report: Report) -> None:
    for stream in ("uniform", "zipf"):
        work = Work.headline(stream, quick=settings.quick)
        for name, (rule, theirs) in RULES.items():
            label = f"{name}, {stream}"
            calls = {
                (label, OURS): ours.dense_fused_step(work, rule),
                (label, BY_HAND): theirs(work),
            }
            timings = interleave(calls, settings.budget)
            del calls
            gc.collect()  # both tables, before the next two are made
            report.timings(timings)
            report.figure(
                f"speedup {name} {stream}",
                timings[label, BY_HAND].median / timings[label, OURS].median,
                "x",
                f"fused step faster than plain JAX by hand, {name}, {stream} ids",
                at_least=1,
            )
