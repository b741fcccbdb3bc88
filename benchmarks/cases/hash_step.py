"""The step of a layer that inserts its keys itself, against static rows and against an insertion before the loss."""

import gc

from benchmarks.contenders import by_hand
from benchmarks.contenders.hashed import Steps
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import interleave

LOAD, COLUMNS, BAG_SIZE = 0.75, 64, 20
STATIC, EXPLICIT = "jax_tt step, static table", "jax_tt insert, then step"
PRESENT, HALF = "jax_tt inserting step", "jax_tt inserting step, half of the keys new"
BY_HAND = "plain JAX step by hand, static table"


@case("hash_step", "Table of 1,000,000 x 64 with 64-bit keys: the step of a layer that inserts")
def measure(settings: Settings, report: Report) -> None:
    rows, sizes = (2048, (8,)) if settings.quick else (1_000_000, (512, 5120))
    for bags in sizes:
        _measure(settings, report, rows, bags)
        gc.collect()


def _measure(settings: Settings, report: Report, rows: int, bags: int) -> None:
    budget = settings.budget
    most = budget.rounds * (budget.turn_calls + 1) + 2
    steps = Steps(rows, COLUMNS, bags, BAG_SIZE, LOAD, most)
    work = f"{bags * BAG_SIZE:,} keys"
    contenders = {
        STATIC: steps.static(),
        EXPLICIT: steps.explicit(),
        PRESENT: steps.inserting(),
        HALF: steps.half_new(),
        BY_HAND: by_hand.sgd_step(steps.work),
    }
    timings = interleave({(work, name): call for name, call in contenders.items()}, budget)
    report.timings(timings)

    def figure(name: str, of: str, over: str, meaning: str, **bound: float) -> None:
        ratio = timings[work, of].median / timings[work, over].median
        report.figure(f"{name}_{bags * BAG_SIZE}", ratio, "x", f"{meaning}, {work}", **bound)

    figure(
        "over_static", PRESENT, STATIC, "inserting step over that of a static table", at_most=1.5
    )
    figure("over_explicit", PRESENT, EXPLICIT, "inserting step over insert, then step", at_most=1.1)
    figure("half_over_static", HALF, STATIC, "half of the keys new, over a static table")
