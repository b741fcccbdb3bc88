"""Many tables in one call against FBGEMM's one call, and against an op for each table."""

import gc

from benchmarks.contenders import collections
from benchmarks.contenders.collections import CRITEO, Tables
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave

OURS, SINGLE, TBE = "jax_tt collection", "jax_tt, an op for each table", "fbgemm TBE"
# (columns, samples, ids in a bag)
WORK = ((16, 128, 1), (16, 2048, 1), (64, 512, 20), (32, 16384, 1))


@case(
    "collection_step",
    "26 dense tables of Criteo's sizes, row-wise Adagrad, Zipf ids: forward, and training step",
)
def measure(settings: Settings, report: Report) -> None:
    fbgemm = peer("fbgemm_tables", report)
    for features, samples, ids in WORK[:1] if settings.quick else WORK:
        work = Tables(CRITEO[4:8] if settings.quick else CRITEO, features, samples, ids)
        makers = {OURS: collections.together, SINGLE: collections.one_by_one}
        if fbgemm:
            makers[TBE] = fbgemm.together
        label = f"D {features}, {samples:,} x {ids} ids"
        calls: dict[tuple[str, str], Call] = {}
        for name, maker in makers.items():
            calls[label, f"{name}, forward"], calls[label, f"{name}, step"] = maker(work)
        timings = interleave(calls, settings.budget)
        del calls
        gc.collect()  # all tables, before the next are made
        report.timings(timings)
        for name, bounds in ((TBE, {"step": 1.3, "forward": 1.2}), (SINGLE, {})):
            for part in ("step", "forward") if name in makers else ():
                ratio = timings[label, f"{name}, {part}"].median
                ratio /= timings[label, f"{OURS}, {part}"].median
                bound = {"at_least": bounds[part]} if bounds else {}
                meaning = f"{label}: {part} faster than {name}"
                report.figure(f"{part} over {name} {label}", ratio, "x", meaning, **bound)
