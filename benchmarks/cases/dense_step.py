"""One training step of a dense table, updated in place, against torch, FBGEMM and flax."""

import gc

import jax

from benchmarks import memory
from benchmarks.contenders import flax_embed, ours
from benchmarks.peers import peer
from benchmarks.registry import Settings, case
from benchmarks.results import Report
from benchmarks.timing import Call, interleave
from benchmarks.work import Work

OURS, TORCH, TBE = "jax_tt fused step", "torch EmbeddingBag + SGD step", "fbgemm TBE step"
TORCH_FORWARD, TBE_FORWARD = "torch EmbeddingBag forward", "fbgemm TBE forward"
FLAX = "nnx.Embed + optax.sgd step"


@case("dense_step", "Dense table, 11,000,000 x 64, 512 bags x 20 ids: forward, backward, SGD")
def measure(settings: Settings, report: Report) -> None:
    works = {s: Work.headline(s, quick=settings.quick) for s in ("uniform", "zipf")}
    _one_step(report, works["uniform"])
    _against_in_place_peers(settings, report, works)
    gc.collect()  # the peers' tables, so that what flax needs fits beside ours
    _against_flax(settings, report, works["uniform"])


def _one_step(report: Report, work: Work) -> None:
    """Memory and the table's address over the first step of a compiled program."""
    step, state = ours.dense_fused_program(work)
    bags = ours.bags_of(work)[0]
    compiled = step.lower(state, bags).compile()
    address = state["embedding"].unsafe_buffer_pointer()
    with memory.Growth() as growth:
        _, state = jax.block_until_ready(compiled(state, bags))
    moved = state["embedding"].unsafe_buffer_pointer() != address
    report.figure(
        "step_memory_mib", growth.bytes / 2**20, "MiB",
        "memory the fused step adds to the table's, at its peak", at_most=64,
    )  # fmt: skip
    report.figure("moved", moved, "", "1 if the step moved the table, 0 if not", at_most=0)


def _against_in_place_peers(settings: Settings, report: Report, works: dict[str, Work]) -> None:
    torch_bag, fbgemm = peer("torch_bag", report), peer("fbgemm", report)
    for stream, work in works.items():
        calls: dict[tuple[str, str], Call] = {(stream, OURS): ours.dense_fused_step(work)}
        if torch_bag:
            calls[stream, TORCH_FORWARD], calls[stream, TORCH] = torch_bag.dense(work)
        if fbgemm:
            calls[stream, TBE_FORWARD], calls[stream, TBE] = fbgemm.dense(work)
        timings = interleave(calls, settings.budget)
        del calls
        gc.collect()
        report.timings(timings)
        for name, step in (("torch", TORCH), ("fbgemm", TBE)):
            if (stream, step) in timings:
                ratio = timings[stream, step].median / timings[stream, OURS].median
                meaning = f"fused step faster than {step}, {stream} ids"
                report.figure(f"speedup_over_{name}_{stream}", ratio, "x", meaning, at_least=1)


def _against_flax(settings: Settings, report: Report, work: Work) -> None:
    calls = {("uniform, second table", OURS): ours.dense_fused_step(work)}
    with memory.Growth() as growth:
        flax = flax_embed.dense_step(work)
        flax(0)
    calls["uniform, second table", FLAX] = flax
    timings = interleave(calls, settings.budget)
    report.timings(timings)
    ratio = timings["uniform, second table", FLAX].median
    ratio /= timings["uniform, second table", OURS].median
    report.figure("speedup_over_flax", ratio, "x", f"fused step faster than {FLAX}", at_least=100)
    report.figure(
        "flax_memory_mib", growth.bytes / 2**20, "MiB",
        "memory of nnx.Embed and its first optax.sgd step, table included, at its peak",
    )  # fmt: skip
