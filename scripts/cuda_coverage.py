"""Which lines of the CUDA sources the tests execute, counted by gcov where the kernels are compiled for the processor.

    python -m scripts.cuda_coverage tests/lookup/test_grad.py ...  # builds, runs these tests, prints a page

`make cuda-coverage` gives it all tests of the ops. Needs GCC and its gcov, no GPU. The installed modules stay as they
are: the tests find the one built here.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.kernel_resources import readable
from scripts.native_build import ROOT, build, configure

SOURCES = ROOT / "ffi" / "cuda"
KERNEL = re.compile(r"__global__\s+void(?:\s+__launch_bounds__\([^)]*\))?\s+(\w+)\(")
# Optimized just enough to be bearable: what is inlined or merged is counted before that.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "None",
    "CMAKE_CXX_FLAGS": "-O1 -DNDEBUG --coverage",
    "JAX_TT_CUDA": "OFF",
    "JAX_TT_EMULATION": "ON",
}
# As `sitecustomize`: the module of this build takes the place of the installed one before anything can ask for that, in
# the processes that tests start as well.
PRELOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("jax_tt._emulated", {path!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
INTRODUCTION = """\
The tests run the CUDA sources, compiled for the CPU with `--coverage`, on the emulator, and gcov counts the lines. A
line of a template counts as executed if any instance executes it. The second table counts instances of kernels; the
sources that CMake generates for each rank and each rule only instantiate templates and are not listed. Code for CUDA
only (`#if`) is not counted."""


@dataclasses.dataclass
class Counts:
    """How often the lines of one source were executed, and its kernels: sums over all compiled sources that have it.

    Attributes:
        lines: by number; lines without code are not included.
        kernels: by name and then by instance, both as the sources have them.
    """

    lines: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    kernels: dict[str, dict[str, int]] = dataclasses.field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )

    @property
    def executed(self) -> int:
        return len(self.lines) - len(self.never)

    @property
    def never(self) -> list[int]:
        return sorted(n for n, count in self.lines.items() if count == 0)


def merge(reports: Iterable[dict[str, Any]], root: Path) -> dict[Path, Counts]:
    """Counts by path, from reports of ``gcov --json-format`` on the sources of a folder."""
    reports, root = list(reports), root.resolve()
    files = [
        (path, file)
        for report in reports
        for file in report["files"]
        # A compiler cache may have made the paths relative to the folder of the build.
        if (path := Path(report["current_working_directory"], file["file"]).resolve()).parent
        == root
    ]
    names = readable(function["name"] for _, file in files for function in file["functions"])
    kernels = {path: KERNEL.findall(path.read_text()) for path, _ in files}
    counts: dict[Path, Counts] = defaultdict(Counts)
    for path, file in files:
        for line in file["lines"]:
            counts[path].lines[line["line_number"]] += line["count"]
        for function in file["functions"]:
            instance = names[function["name"]]
            if (kernel := instance.partition("<")[0]) in kernels[path]:
                counts[path].kernels[kernel][instance] += function["execution_count"]
    return dict(sorted(counts.items()))


def collect(folder: Path) -> Iterator[dict[str, Any]]:
    """The counts of gcov for every CUDA source; sources that were not loaded count as never executed."""
    objects = folder / "CMakeFiles" / "_emulated.dir"
    # Sources that CMake generates have objects in a folder of their own.
    places = ("ffi/cuda/**/*.cu.gcno", "fast_ranks/*.gcno", "rules/*.gcno")
    for notes in sorted(path for place in places for path in objects.glob(place)):
        done = subprocess.run(
            [os.environ.get("GCOV", "gcov"), "--json-format", "--stdout", notes],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        )
        yield json.loads(done.stdout)


def run_tests(folder: Path, tests: list[str]) -> str:
    """Runs the tests on the emulated kernels in one process; returns pytest's last line."""
    for stale in folder.rglob("*.gcda"):
        stale.unlink()
    (module,) = folder.glob("_emulated.*")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "-k", "cuda", *tests]
    with tempfile.TemporaryDirectory() as preload:
        Path(preload, "sitecustomize.py").write_text(PRELOAD.format(path=str(module)))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([preload, str(ROOT)])}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit("tests failed: their lines are not counted")
    return done.stdout.splitlines()[-1]


def share(executed: int, lines: int) -> str:
    # Down, so that only all lines are 100 %.
    return f"{executed * 1000 // lines / 10:.1f} %" if lines else "no code"


def table(head: str, rows: Iterable[tuple[object, ...]]) -> list[str]:
    """Lines of a Markdown table."""
    columns = head.count("|") + 1
    body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return ["", f"| {head} |", "|" + "---|" * columns, *body, ""]


def page(counts: dict[Path, Counts], tests: list[str], passed: str) -> str:
    """The page, in Markdown."""
    total = sum(len(c.lines) for c in counts.values())
    executed = sum(c.executed for c in counts.values())
    kernels = sorted(
        (name, path.name, instances)
        for path, c in counts.items()
        for name, instances in c.kernels.items()
    )
    idle = sorted(i for *_, some in kernels for i, count in some.items() if count == 0)
    files = ", ".join(f"`{Path(test).name}`" for test in tests)
    lines = [
        "# Coverage of the CUDA sources",
        "",
        INTRODUCTION,
        "",
        *textwrap.wrap(
            f"Tests, those with `cuda` in their names or in that of their file ({passed}): {files}.",
            120,
            break_on_hyphens=False,
        ),
        "",
        f"{executed} of {total} lines: {share(executed, total)}.",
        *table(
            "source | lines | executed | share",
            (
                (f"`{path.name}`", len(c.lines), c.executed, share(c.executed, len(c.lines)))
                for path, c in counts.items()
            ),
        ),
        "## Kernels",
        *table(
            "kernel | source | instances | executed",
            (
                (f"`{name}`", f"`{source}`", len(some), sum(n > 0 for n in some.values()))
                for name, source, some in kernels
            ),
        ),
        f"Instances never executed: {', '.join(f'`{i}`' for i in idle) or 'none'}.",
        "",
        "## Lines never executed",
        "",
    ]
    for path, c in counts.items():
        if c.never:
            text = path.read_text().splitlines()
            never = [f"{n:4}  {text[n - 1]}" for n in c.never]
            lines += [f"`{path.name}`", "", "```text", *never, "```", ""]
    if executed == total:
        lines += ["None."]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "coverage")
    arguments = parser.parse_args()
    configure(arguments.build, OPTIONS)
    build(arguments.build, "_emulated")
    passed = run_tests(arguments.build, arguments.tests)
    counts = merge(collect(arguments.build), SOURCES)
    if not counts:
        sys.exit(f"gcov counts no line of {SOURCES}")
    text = page(counts, arguments.tests, re.search(r"\d+ passed", passed)[0])  # type: ignore[index]
    print(text)
    never_run = [
        path.name
        for path, c in counts.items()
        if path.suffix == ".cu" and c.lines and not c.executed
    ]
    if never_run:
        sys.exit(f"no test executes {', '.join(never_run)}")


if __name__ == "__main__":
    main()
