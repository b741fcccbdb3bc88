"""The headline batch: a TT table compared with the alternatives to jax_tt, and with the rate of the machine."""

from benchmarks.contenders import numpy_matmul, ours, xla
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, Timing, interleave
from benchmarks.work import Work

FORWARD, FUSED, OPTAX = "jax_tt forward", "jax_tt fused step", "jax_tt step with optax"
REFERENCE, XLA, TLTORCH = "jax_tt reference step", "XLA gather + einsum step", "tltorch step"
MATMUL = ("float32", "numpy matmul")


@case("headline", "TT table, 11,000,000 x 64, rank 32, 512 bags x 20 ids: forward, backward, SGD")
def measure(settings: Settings, report: Report) -> None:
    tltorch = peer("tltorch_bag", report)
    matmul, matmul_flops = numpy_matmul.matmul(256 if settings.quick else 2048)
    calls: dict[tuple[str, str], Call] = {MATMUL: matmul}
    works = {s: Work.headline(s, quick=settings.quick) for s in ("uniform", "zipf")}
    for stream, work in works.items():
        calls[stream, FORWARD] = ours.tt_forward(work)
        calls[stream, FUSED] = ours.tt_fused_step(work)
        calls[stream, OPTAX] = ours.tt_optax_step(work)
        calls[stream, REFERENCE] = ours.tt_optax_step(work, method="reference")
        calls[stream, "XLA gather + einsum forward"] = xla.tt_forward(work)
        calls[stream, XLA] = xla.tt_step(work)
        if tltorch:
            calls[stream, "tltorch forward"], calls[stream, TLTORCH] = tltorch.tt(work)
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    _compare(report, timings)
    _hold_against_machine(report, timings, works["uniform"].step_flops, matmul_flops)


def _compare(report: Report, timings: dict[tuple[str, str], Timing]) -> None:
    peers = {s: [timings[s, p].median for p in (REFERENCE, XLA, TLTORCH) if (s, p) in timings]
             for s in ("uniform", "zipf")}  # fmt: skip
    own = {s: timings[s, FUSED].median for s in ("uniform", "zipf")}
    report.figure(
        "speedup_uniform", min(peers["uniform"]) / own["uniform"], "x",
        "fused step faster than the best of tltorch and XLA, uniform ids", at_least=28,
    )  # fmt: skip
    report.figure(
        "speedup_zipf", min(peers["zipf"]) / own["zipf"], "x",
        "fused step faster than the best of tltorch and XLA, Zipf ids",
    )  # fmt: skip
    report.figure(
        "zipf_over_uniform", own["zipf"] / own["uniform"], "",
        "fused step with Zipf ids over the same with uniform ids", at_most=0.6,
    )  # fmt: skip


def _hold_against_machine(
    report: Report, timings: dict[tuple[str, str], Timing], step_flops: int, matmul_flops: float
) -> None:
    rate = step_flops / timings["uniform", FUSED].median
    machine = matmul_flops / timings[MATMUL].median
    report.figure("step_rate", rate / 1e9, "GFLOP/s", "fused step, uniform ids: rate")
    report.figure("matmul_rate", machine / 1e9, "GFLOP/s", "numpy float32 matmul: rate")
    report.figure("floor_ms", 1e3 * step_flops / machine, "ms", "fused step at the matmul's rate")
    report.figure(
        "share_of_matmul_rate", rate / machine, "",
        "fused step's rate over the matmul's", at_least=0.75,
    )  # fmt: skip
