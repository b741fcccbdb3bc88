"""Times the same contenders over a range of tables or batches."""

from benchmarks import memory
from benchmarks.contenders import ours, xla
from benchmarks.registry import Settings
from benchmarks.results import Report
from benchmarks.timing import interleave
from benchmarks.work import Work

FORWARD, FUSED, XLA = "jax_tt forward", "jax_tt fused step", "XLA gather + einsum step"


def sweep(settings: Settings, report: Report, works: dict[str, Work]) -> None:
    """Forward and fused step of each work, against plain XLA where its temporaries fit."""
    for name, work in works.items():
        calls = {(name, FORWARD): ours.tt_forward(work), (name, FUSED): ours.tt_fused_step(work)}
        needed = xla_temporary_bytes(work)
        if needed < memory.available_bytes() // 2:
            calls[name, XLA] = xla.tt_step(work)
        else:
            report.note(f"{name}: {XLA} needs about {needed / 2**30:.0f} GiB and was not timed")
        timings = interleave(calls, settings.budget)
        report.timings(timings)
        if (name, XLA) in timings:
            ratio = timings[name, XLA].median / timings[name, FUSED].median
            meaning = f"{name}: fused step faster than plain XLA"
            report.figure(f"speedup {name}", ratio, "x", meaning)


def xla_temporary_bytes(work: Work) -> int:
    """Approximate temporary memory of plain XLA: for each lookup its slice of every core, and its gradient."""
    per_lookup = sum(r * q * s for _, r, q, s in work.shape.core_shapes)
    return 2 * 4 * work.nnz * per_lookup
