"""The speedup of the forward pass by a row cache, for several ranks of the table."""

import dataclasses

from benchmarks.contenders import ours
from benchmarks.contenders.cached import Filled
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from benchmarks.work import Work
from jax_tt import TTShape

RANKS = (8, 16, 32, 64, 128)
PLAIN, CACHED = "forward without a cache", "forward with a cache"


@case("cache_rank", "Row cache of 1 % of 11,000,000 x 64, 512 bags x 20 ids, 90 % hits: rank")
def measure(settings: Settings, report: Report) -> None:
    whole = Work.headline(quick=settings.quick)
    rows, columns = whole.shape.row_factors, whole.shape.col_factors
    for rank in RANKS[:2] if settings.quick else RANKS:
        shape = TTShape(whole.shape.num_embeddings, whole.shape.features, rank, rows, columns)
        work = dataclasses.replace(whole, shape=shape)
        filled = Filled(work, work.shape.num_embeddings // 100)
        own = dataclasses.replace(work, batches=filled.batches(0.9))
        calls: dict[tuple[str, str], Call] = {
            (f"r = {rank}", PLAIN): ours.tt_forward(own),
            (f"r = {rank}", CACHED): filled.forward(ours.bags_of(own)),
        }
        timings = interleave(calls, settings.budget)
        report.timings(timings)
        plain, cached = (timings[name].median for name in calls)
        report.figure(
            f"speedup r = {rank}", plain / cached, "x",
            f"r = {rank}: forward pass with 90 % hits faster than without a cache",
        )  # fmt: skip
