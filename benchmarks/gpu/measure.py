"""Measures works with every contender and compares the results with the reference."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import contenders, kernels, peaks, timing
from benchmarks.gpu.stages import Stage
from benchmarks.gpu.timing import Called, Contender, Replayed, Windows
from benchmarks.gpu.work import GpuWork
from benchmarks.peers import peer
from benchmarks.registry import Settings
from benchmarks.results import Report
from benchmarks.timing import Timing
from benchmarks.work import LEARNING_RATE

STREAMS = ("uniform", "zipf")
EMPTY = "the loop alone"
FORWARD, BACKWARD, FUSED = "jax_tt forward", "jax_tt forward + backward", "jax_tt fused step"
TF32 = "jax_tt fused step, tensorfloat32"
CALLED = "jax_tt fused step, called from Python"
UNCAPTURED = f"{CALLED}, no command buffers"
DENSE = "jax_tt EmbedBag fused step, dense table"
DENSE_FORWARD = "jax_tt EmbedBag forward, dense table"
DENSE_CALLED = f"{DENSE}, called from Python"
DENSE_UNCAPTURED = f"{DENSE_CALLED}, no command buffers"
# Options of the compiler without which a step is one or several graphs.
NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}
# Of the gradients of a core, relative to the largest: rounding of sums in another order.
LARGEST_ERROR = 1e-4

Timings = dict[tuple[str, str], Timing]
Contenders = Mapping[str, Callable[[], Contender]]


def windows(settings: Settings) -> Windows:
    return Windows.quick() if settings.quick else Windows()


def measure(
    label: str,
    batches: timing.Batches,
    makers: Contenders,
    settings: Settings,
    report: Report,
    streams: tuple[str, ...] = STREAMS,
) -> Timings:
    """Adds a row for every contender and stream, as soon as it is measured.

    Args:
        label: of the work, ahead of the name of the stream; may be empty.
        batches: the ids, the same for all contenders.
        makers: of contenders, of which one at a time is there.
        settings: of the run.
        report: gets the rows.
        streams: of ids.
    """
    ids = {stream: batches.ids(np.random.default_rng(0), stream) for stream in streams}
    timings: Timings = {}
    for name, make in makers.items():
        for stream, value in timing.timed(make, name, ids, windows(settings)):
            row = {(f"{label}, {stream}" if label else stream, name): value}
            report.timings(row)
            timings |= row
    return timings


def trains(work: GpuWork) -> Contenders:
    """Contenders on a tensor train, the most important ones first."""
    fused = contenders.tt_fused
    return {
        FUSED: lambda: Replayed(*fused(work, "auto")),
        FORWARD: lambda: Replayed(*contenders.tt_forward(work, "auto")),
        BACKWARD: lambda: Replayed(*contenders.tt_gradient(work, "auto")),
        EMPTY: lambda: Replayed(*contenders.empty(work)),
        CALLED: lambda: Called(*fused(work, "auto")),
        UNCAPTURED: lambda: Called(*fused(work, "auto"), options=NO_COMMAND_BUFFERS),
        TF32: lambda: Replayed(*fused(work, "auto"), precision="tensorfloat32"),
    }


def references(work: GpuWork) -> Contenders:
    """The same by XLA alone, which takes long to compile."""
    return {
        "XLA reference step": lambda: Replayed(*contenders.tt_fused(work, "reference")),
        "XLA reference forward": lambda: Replayed(*contenders.tt_forward(work, "reference")),
    }


def dense(work: GpuWork) -> Contenders:
    """Contenders on a dense table of the same rows and columns."""
    fused = contenders.dense_fused
    return {
        DENSE: lambda: Replayed(*fused(work, "auto")),
        DENSE_FORWARD: lambda: Replayed(*contenders.dense_forward(work)),
        DENSE_CALLED: lambda: Called(*fused(work, "auto")),
        DENSE_UNCAPTURED: lambda: Called(*fused(work, "auto"), options=NO_COMMAND_BUFFERS),
    }


def dense_in_flax(work: GpuWork) -> Contenders:
    """The same table in Flax."""
    return {"nnx.Embed + optax.sgd, dense table": lambda: Replayed(*contenders.flax_dense(work))}


def dense_in_torch(work: GpuWork, report: Report) -> Contenders:
    """The same table in torch, where it is installed."""
    torch_dense = jax.default_backend() == "gpu" and peer("torch_dense", report, "gpu")
    if not torch_dense:
        return {}
    # Each operation is launched from Python, as in the rows of steps that are called from it.
    name = "torch EmbeddingBag + SGD, dense table, called from Python"
    return {name: lambda: torch_dense.DenseStep(work)}


def report_error(name: str, work: GpuWork, report: Report) -> None:
    """Notes how far gradients and a fused step are off the reference; raises where that is more than rounding."""
    ids = work.ids(np.random.default_rng(1), "zipf")[0]
    step, start = contenders.tt_gradient(work, "auto")
    fused, state = contenders.tt_fused(work, "auto")
    with jax.default_matmul_precision("highest"):
        reference, _ = contenders.tt_gradient(work, "reference")
        want = jax.jit(reference)(start, ids)[1]
    timing.poison()
    got = jax.jit(step)(start, ids)[1]
    stepped = jax.jit(fused)(state, ids)[0]
    after = [stepped[f"core_{k}"] for k in range(len(got))]
    error = 0.0
    for k, (own, wanted) in enumerate(zip(got, want, strict=True)):
        largest = float(jnp.abs(wanted).max())
        error = max(error, float(jnp.abs(own - wanted).max()) / largest)
        before = start[0][0][k]
        off = float(jnp.abs(after[k] - (before - LEARNING_RATE * wanted)).max())
        # The new table is rounded to float32.
        allowed = LEARNING_RATE * LARGEST_ERROR * largest
        allowed += 2**-23 * float(jnp.abs(before).max())
        if not off <= allowed:
            raise AssertionError(f"{name}: core {k} is off by {off:.1e} after a fused step")
    if not error < LARGEST_ERROR:  # also where it is NaN
        raise AssertionError(f"{name}: gradients are off the reference by {error:.1e}")
    report.note(f"{name}: largest error of a gradient relative to the largest one {error:.1e}")


def report_kernels(
    label: str,
    step: tuple[timing.Step, Any],
    batches: timing.Batches,
    names: kernels.Names,
    report: Report,
) -> dict[str, float]:
    """Adds the time of every kernel in a step, and returns that of all kernels of a stage; empty without a GPU.

    Args:
        label: of the work.
        step: the step and its state.
        batches: whose ids are uniform.
        names: how the kernels of each stage are called.
        report: gets the figures.
    """
    ids = batches.ids(np.random.default_rng(0), "uniform")
    # Kernels of graphs are not listed one by one everywhere.
    contender = Called(*step, options=NO_COMMAND_BUFFERS)
    contender.prepare(ids)
    contender.restart()
    contender.run(ids, 1)
    found = kernels.profiled(lambda: contender.run(ids, 1))
    if not found:
        report.note(f"{label}: the profiler has no kernels of a GPU here")
    seconds: dict[str, float] = defaultdict(float)
    for name, (launches, total) in sorted(found.items(), key=lambda item: -item[1][1]):
        stage, each = kernels.stage_of(name, names), total / batches.steps
        own = f"{kernels.short_name(name)} ({stage}), {launches / batches.steps:g} launches"
        report.figure(f"{label} kernel {name[:120]}", 1e6 * each, "us", f"{label}: {own}")
        seconds[stage] += each
    return dict(seconds)


def report_stages(
    label: str,
    step: tuple[timing.Step, Any],
    work: GpuWork,
    model: tuple[kernels.Names, list[Stage]],
    report: Report,
) -> None:
    """Adds the time that the kernels of each stage take, beside the expected one; arguments as of `report_kernels`."""
    names, expected = model
    seconds = report_kernels(label, step, work, names, report)
    for stage in expected if seconds else ():
        meaning = f"{label}: kernels of {stage.name}, expected {1e6 * stage.expected:.1f} us"
        measured = 1e6 * seconds.get(stage.name, 0.0)
        report.figure(f"{label} stage {stage.name}", measured, "us", meaning)


def floor_seconds(work: GpuWork, settings: Settings) -> float:
    """The least time of a fused step on this card if no product is shared between ids."""
    card = peaks.of_this_card(settings.quick)
    # Ids, bags and their gradients once; cores read, and written by the update.
    moved = 4 * (work.nnz + 2 * work.bags * work.shape.features + 2 * work.shape.num_params)
    return max(work.step_flops / card.flops, moved / card.bytes)


def over_floor(works: dict[str, GpuWork], settings: Settings, report: Report) -> None:
    """Rows of each work, and its fused step relative to the floor of this card."""
    for k, (name, work) in enumerate(works.items()):
        every = {**trains(work), **references(work)}
        makers = {each: every[each] for each in (FUSED, FORWARD, BACKWARD, "XLA reference step")}
        timings = measure(name, work, makers, settings, report)
        ratio = timings[f"{name}, uniform", FUSED].median / floor_seconds(work, settings)
        report.figure(f"over_floor_{k}", ratio, "x", f"{name}: fused step over the floor")
        report_error(name, work, report)
