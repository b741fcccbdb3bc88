"""Measures one work with every contender and compares the results with the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import contenders, timing
from benchmarks.gpu.work import GpuWork
from benchmarks.peers import peer
from benchmarks.registry import Settings
from benchmarks.results import Report
from benchmarks.timing import Timing

# Multiply-adds in float32 and bytes per second of an H200, as measured on one.
PEAK_FLOPS, PEAK_BYTES = 60e12, 4.3e12
STREAMS = ("uniform", "zipf")
FORWARD, BACKWARD, FUSED = "jax_tt forward", "jax_tt forward + backward", "jax_tt fused step"
CALLED = "jax_tt fused step, called from Python"
DENSE = "jax_tt EmbedBag fused step, dense table"

Timings = dict[tuple[str, str], Timing]


def measure(
    works: dict[str, GpuWork],
    settings: Settings,
    report: Report,
    *,
    streams: tuple[str, ...] = STREAMS,
) -> Timings:
    """Adds a row for every work, stream and contender.

    Args:
        works: by name.
        settings: of the run; a quick run uses the native operations that the machine has.
        report: gets rows and notes.
        streams: of ids.
    """
    rounds = 2 if settings.quick else 7
    precision: Any = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if precision is None:
        report.note(
            "float32 products: jax_tt full precision, XLA as it likes, which is TF32 on a GPU"
        )
    timings: Timings = {}
    for name, work in works.items():
        report_error(name, work, report)
        calls = {
            FORWARD: timing.Replayed(*contenders.tt_forward(work, "auto")),
            BACKWARD: timing.Replayed(*contenders.tt_gradient(work, "auto")),
            FUSED: timing.Replayed(*contenders.tt_fused(work, "auto")),
            CALLED: timing.Called(*contenders.tt_fused(work, "auto")),
            "XLA reference forward": timing.Replayed(*contenders.tt_forward(work, "reference")),
            "XLA reference step": timing.Replayed(*contenders.tt_fused(work, "reference")),
        }
        for stream in streams:
            found = timing.interleave(calls, work, stream, rounds)
            label = f"{name}, {stream}" if len(works) > 1 else stream
            timings |= {(label, contender): value for contender, value in found.items()}
    report.timings(timings)
    return timings


def measure_dense(works: dict[str, GpuWork], settings: Settings, report: Report) -> Timings:
    """Adds a row for a step of a dense table of the same rows and columns with every work and contender."""
    timings: Timings = {}
    for name, work in works.items():
        calls = {
            DENSE: timing.Replayed(*contenders.dense_fused(work, "auto")),
            "nnx.Embed + optax.sgd, dense table": timing.Replayed(*contenders.flax_dense(work)),
        }
        torch_dense = jax.default_backend() == "gpu" and peer("torch_dense", report, "gpu")
        if torch_dense:
            calls["torch EmbeddingBag + SGD, dense table"] = torch_dense.dense_step(work)
        for stream in STREAMS:
            found = timing.interleave(calls, work, stream, 2 if settings.quick else 7)
            timings |= {(f"{name}, {stream}", each): value for each, value in found.items()}
        del calls  # tables of gigabytes
    report.timings(timings)
    return timings


def report_error(name: str, work: GpuWork, report: Report) -> None:
    """Raises if one fused step differs from that of the reference by more than rounding; notes the difference."""
    ids = work.ids(np.random.default_rng(1), "zipf")[0]
    step, table = contenders.tt_fused(work, "auto")
    with jax.default_matmul_precision("highest"):
        reference, _ = contenders.tt_fused(work, "reference")
        want = jax.jit(reference)(table, ids)
    timing.poison()
    got = jax.jit(step)(table, ids)
    error = 0.0
    for new, wanted, old in zip(got.cores, want.cores, table.cores, strict=True):
        moved = jnp.abs(wanted - old).max()
        error = max(error, float(jnp.abs(new - wanted).max() / moved))
    if not error < 1e-3:  # also where it is NaN
        raise AssertionError(f"{name}: the fused step is off the reference by {error:.1e}")
    report.note(f"{name}: largest error of a step relative to its largest change {error:.1e}")


def floor_seconds(work: GpuWork) -> float:
    """The least time of a fused step on an H200 if no product is shared between ids."""
    # Ids, bags and their gradients once; cores read, and written by the update.
    moved = 4 * (work.nnz + 2 * work.bags * work.shape.features + 2 * work.shape.num_params)
    return max(work.step_flops / PEAK_FLOPS, moved / PEAK_BYTES)


def over_floor(works: dict[str, GpuWork], timings: Timings, report: Report) -> None:
    """The fused step of each work relative to the limit of an H200."""
    for k, (name, one) in enumerate(works.items()):
        label = f"{name}, uniform" if len(works) > 1 else "uniform"
        ratio = timings[label, FUSED].median / floor_seconds(one)
        report.figure(f"over_floor_{k}", ratio, "x", f"{name}: fused step over the floor")
