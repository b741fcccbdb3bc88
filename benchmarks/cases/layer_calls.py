"""What a step and an evaluation of many small lookups cost, as a training loop calls them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.contenders import layer_calls
from benchmarks.contenders.collections import CRITEO, Tables
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave

STACK, TABLES, EMBEDS, TBE = "stack=True", "stack=False", "26 nnx.Embed", "fbgemm TBE"
FAST = {"step": "nnx.jit_partial", "evaluation": "nnx.jit, graph=False"}
# Of a stack to TBE, by part and the way of the call.
BOUNDS = {("step", "nnx.jit"): 0.6, ("step", FAST["step"]): 1.2}


@case("layer_calls", "Layers of 26 dense tables, D 16, 128 samples x 1 id: ways to call a step")
def measure(settings: Settings, report: Report) -> None:
    # Small ones, as nothing here depends on their sizes but the copies of what no step donates.
    sizes = tuple(min(rows, 1000 if settings.quick else 300_000) for rows in CRITEO)
    work = Tables(sizes[:4] if settings.quick else sizes, 16, 128, (1,) * len(CRITEO))
    makers: dict[str, Callable[[], Any]] = {
        STACK: partial(layer_calls.collection, work, True),
        TABLES: partial(layer_calls.collection, work, False),
    }
    calls: dict[tuple[str, str], Call] = {}
    for name, make in makers.items():
        calls |= {("step", f"{name}, {w}"): c for w, c in layer_calls.steps(work, make).items()}
    for name, make in (makers | {EMBEDS: partial(layer_calls.Embeds, work)}).items():
        found = layer_calls.evaluations(work, make)
        calls |= {("evaluation", f"{name}, {way}"): call for way, call in found.items()}
    rivals = [TABLES, EMBEDS]
    if fbgemm := peer("fbgemm_tables", report):
        calls["evaluation", TBE], calls["step", TBE] = fbgemm.together(work)
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    for part in ("step", "evaluation"):
        for way in ("nnx.jit", FAST[part]):
            ours = timings[part, f"{STACK}, {way}"].median
            for rival in (TBE, *(f"{name}, {way}" for name in rivals)):
                if (part, rival) not in timings:
                    continue
                report.figure(
                    f"{part} {way} over {rival}",
                    timings[part, rival].median / ours,
                    "x",
                    f"{part} of a stack, called by {way}, faster than {rival}",
                    at_least=BOUNDS.get((part, way)) if rival == TBE else None,
                )
