"""Whole training steps of DLRM: jax_tt with Flax, plain JAX, and PyTorch with FBGEMM."""

import gc

from benchmarks.contenders import clicks
from benchmarks.contenders.clicks import Clicks
from benchmarks.contenders.collections import CRITEO
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import interleave

OURS = "jax_tt with Flax"
# Hidden layers of the two MLPs: as published for Criteo Kaggle, and as in the DLRM example.
LAYERS = {"published layers": ((512, 256, 64), (512, 256)), "small layers": ((64,), (64, 32))}


@case("dlrm_peers", "DLRM with 26 dense tables of Criteo's sizes, D 16, 2,048 examples: whole step")
def measure(settings: Settings, report: Report) -> None:
    torch = peer("clicks_torch", report)
    for label, layers in LAYERS.items():
        sizes, samples = (CRITEO[4:8], 16) if settings.quick else (CRITEO, 2048)
        work = Clicks(sizes, 16, samples, *layers)
        makers = {OURS: clicks.together, "plain JAX by hand": clicks.by_hand}
        if torch:
            makers["torch and fbgemm TBE"] = torch.eager
            makers["torch.compile and fbgemm TBE"] = torch.compiled
        calls = {(label, name): maker(work) for name, maker in makers.items()}
        timings = interleave(calls, settings.budget)
        del calls
        gc.collect()  # all tables, before the next are made
        report.timings(timings)
        best = min(timings[label, name].median for name in makers if name != OURS)
        report.figure(
            f"speedup {label}", best / timings[label, OURS].median, "x",
            f"{label}: step faster than the best of the others", at_least=1.2,
        )  # fmt: skip
