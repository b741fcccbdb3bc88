"""The time of each kernel in a step, as the profiler of JAX has it."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from benchmarks.gpu import stages

# How the names of the kernels of each stage begin.
Names = Mapping[str, tuple[str, ...]]

# The stages of `benchmarks.gpu.stages`, and how the names of their kernels begin. Plans are hashed and compared where a
# batch may be sharded.
TRAIN_STAGES: Names = {
    "plan": (
        "PlanSlices",
        "ReadBatch",
        "SortInOneBlock",
        "SortTiles",
        "CountBins",
        "CountRows",
        "NumberRows",
        "Cut",
        "HashBatch",
        "ComparePlan",
    ),
    "rows": ("MakeRows",),
    "bags": ("SumLines",),
    "gradients": ("MakeShares",),
    "sums, step": ("SumAndStepSlices",),
}
DENSE_STAGES: Names = {
    "bags": ("PoolRows",),
    "plan": ("SplitAndSort", "MakeKeys", "CountBins", "SortTiles"),
    "rows read often": ("SumLongRows", "SumParts"),
    "sums, step": ("SumRows",),
}
# Of tables of both kinds in one step.
MIXED_STAGES: Names = {
    f"{kind}: {stage}": names
    for kind, of_kind in (("trains", TRAIN_STAGES), ("dense", DENSE_STAGES))
    for stage, names in of_kind.items()
}
OTHERS = stages.OTHERS.name


def short_name(name: str) -> str:
    """The name of a kernel without its type, its namespaces, its template arguments and its parameters."""
    mangled, parts = name.removeprefix("_ZN"), []
    while mangled != name and (length := re.match(r"\d+", mangled)):
        mangled = mangled[length.end() :]
        parts.append(mangled[: int(length[0])])
        mangled = mangled[int(length[0]) :]
    plain = (
        parts[-1] if parts else name.removeprefix("void ").replace("(anonymous namespace)::", "")
    )
    return plain.partition("<")[0].partition("(")[0].rpartition("::")[2]


def stage_of(name: str, names: Names) -> str:
    """The stage of a kernel, or `OTHERS`."""
    short = short_name(name)
    for stage, beginnings in names.items():
        if short.startswith(beginnings):
            return stage
    return OTHERS


def profiled(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Launches and seconds of each kernel while `run` ran; empty without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if not line.name.startswith("Stream"):
                        continue
                    for event in line.events:
                        count, seconds = found[event.name]
                        found[event.name] = count + 1, seconds + 1e-9 * event.duration_ns
    return dict(found)
