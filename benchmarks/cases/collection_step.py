"""Many tables in one call against FBGEMM's one call, and against an op for each table."""

import gc

from benchmarks.contenders import collections
from benchmarks.contenders.collections import CRITEO, Tables
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from examples.dlrm import mlperf

OURS, SINGLE, TBE = "jax_tt collection", "jax_tt, an op for each table", "fbgemm TBE"


@case(
    "collection_step",
    "26 dense tables of Criteo's sizes, row-wise Adagrad, Zipf ids: forward, and training step",
)
def measure(settings: Settings, report: Report) -> None:
    sizes = CRITEO[4:8] if settings.quick else CRITEO
    bounds = {(TBE, "step"): 1.3, (TBE, "forward"): 1.2}
    for features, samples, ids in ((16, 128, 1), (16, 2048, 1), (64, 512, 20), (32, 16384, 1)):
        work = Tables(sizes, features, samples, (ids,) * len(sizes))
        label = f"D {features}, {samples:,} x {ids} ids"
        _compare(work, label, (OURS, SINGLE, TBE), bounds, settings, report)
        if settings.quick:
            return


@case(
    "collection_mlperf",
    "the 26 tables of MLPerf's DLRM-DCNv2, rows / 50, multi-hot Zipf ids: forward, and training step",
)
def measure_mlperf(settings: Settings, report: Report) -> None:
    divide, features, samples = (50_000, 8, 16) if settings.quick else (50, 128, 512)
    sizes = tuple(-(-rows // divide) for rows in mlperf.SIZES)
    work = Tables(sizes, features, samples, mlperf.MULTI_HOT)
    bounds = {(TBE, "step"): 1.3}
    _compare(work, f"D {features}, {samples:,}", (OURS, TBE), bounds, settings, report)


@case(
    "collection_mixed",
    "26 tables of Criteo's sizes, the seven largest as tensor trains: forward, and training step",
)
def measure_mixed(settings: Settings, report: Report) -> None:
    sizes = CRITEO[4:8] if settings.quick else CRITEO
    bounds = {(SINGLE, "step"): 1.3}
    for features, samples in ((16, 128), (16, 2048)):
        compressed = 600 if settings.quick else 100_000
        work = Tables(sizes, features, samples, (1,) * len(sizes), compressed)
        _compare(
            work, f"D {features}, {samples:,} x 1 ids", (OURS, SINGLE), bounds, settings, report
        )
        if settings.quick:
            return


def _compare(
    work: Tables,
    label: str,
    names: tuple[str, ...],
    bounds: dict[tuple[str, str], float],
    settings: Settings,
    report: Report,
) -> None:
    """Times contenders turn by turn, ours first; ``bounds`` are for ratios to another in a part."""
    makers = {OURS: collections.together, SINGLE: collections.one_by_one}
    if TBE in names and (fbgemm := peer("fbgemm_tables", report)):
        makers[TBE] = fbgemm.together
    calls: dict[tuple[str, str], Call] = {}
    for name in names:
        if name in makers:
            forward, step = makers[name](work)
            calls |= {(label, f"{name}, forward"): forward, (label, f"{name}, step"): step}
    timings = interleave(calls, settings.budget)
    del calls
    gc.collect()  # all tables, before the next are made
    report.timings(timings)
    for name in names[1:]:
        for part in ("step", "forward") if name in makers else ():
            ratio = timings[label, f"{name}, {part}"].median
            ratio /= timings[label, f"{OURS}, {part}"].median
            meaning = f"{label}: {part} faster than {name}"
            report.figure(
                f"{part} over {name} {label}",
                ratio,
                "x",
                meaning,
                at_least=bounds.get((name, part)),
            )
