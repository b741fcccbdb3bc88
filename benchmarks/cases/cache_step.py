"""The cost of a row cache without hits, and its benefit with hits."""

import dataclasses

from benchmarks.contenders import ours
from benchmarks.contenders.cached import Filled
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from benchmarks.work import Work

HITS = (0.0, 0.5, 0.9, 0.99)
PLAIN_FORWARD, PLAIN = "forward without a cache", "fused step without a cache"
CACHED_FORWARD, CACHED = "forward with a cache", "fused step with a cache"
DENSE = "fused step of a dense table"


@case("cache_step", "Row cache of 1 % of 11,000,000 x 64, rank 32, 512 bags x 20 ids, by hit rate")
def measure(settings: Settings, report: Report) -> None:
    work = Work.headline(quick=settings.quick)
    filled = Filled(work, work.shape.num_embeddings // 100)
    calls: dict[tuple[str, str], Call] = {}
    for hit_rate in HITS:
        at = _name(hit_rate)
        own = dataclasses.replace(work, batches=filled.batches(hit_rate))
        bags = ours.bags_of(own)
        calls[at, PLAIN_FORWARD] = ours.tt_forward(own)
        calls[at, CACHED_FORWARD] = filled.forward(bags)
        calls[at, PLAIN] = ours.tt_fused_step(own)
        calls[at, CACHED] = filled.fused_step(bags)
        if hit_rate == HITS[-1]:
            calls[at, DENSE] = ours.dense_fused_step(own)
    timings = interleave(calls, settings.budget)
    report.timings(timings)

    def ratio(hit_rate: float, above: str, below: str) -> float:
        at = _name(hit_rate)
        return timings[at, above].median / timings[at, below].median

    report.figure(
        "cost_at_0", ratio(0.0, CACHED, PLAIN), "",
        "fused step with a cache that never hits over one without a cache", at_most=1.1,
    )  # fmt: skip
    report.figure(
        "forward_speedup_at_90", ratio(0.9, PLAIN_FORWARD, CACHED_FORWARD), "x",
        "forward pass with 90 % hits faster than without a cache", at_least=4,
    )  # fmt: skip
    report.figure(
        "over_dense_at_99", ratio(0.99, CACHED, DENSE), "",
        "fused step with 99 % hits over that of a dense table", at_most=1.5,
    )  # fmt: skip


def _name(hit_rate: float) -> str:
    return f"{hit_rate:.0%} hits"
