"""All checks that need a GPU, in at most thirteen minutes on a bare machine without network, in one run or several.

    python3 scripts/gpu_check.py --out somewhere --seconds 450 --commit 0123abcd
    python3 scripts/gpu_check.py --out somewhere --seconds 330 --commit 0123abcd    # goes on
    python3 scripts/gpu_check.py --dry-run            # without a GPU, to test this script

Loads the native modules of `make gpu-bundle`, or builds them where those do not load, then measures, runs the tests
marked ``gpu``, and runs operations under compute-sanitizer: stage by stage, the most valuable first, each within its
time. Rows of benchmarks and results of tests are written to a folder of the card and the commit in ``--out`` as they
come, so that a kill loses only what was not finished, and another card takes nothing away. Outcomes and rows are kept
in ``build/gpu-check/earlier``, too, from where the next run on the same card and commit goes on with the stages that
never ran, and then with those that failed.
A stage that fails does not stop the next. Exit status 1 where one failed.
"""

import argparse
import datetime
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402
from benchmarks.results import Report, save  # noqa: E402
from scripts.gpu_bundle import BUNDLE  # noqa: E402
from scripts.staged import Outcome, Run, Stage, replace  # noqa: E402

BUILD = ROOT / "build" / "gpu-check"
STAGES, ROWS = "stages.json", "rows.jsonl"
# Programs that one process has compiled are there for the next.
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(BUILD / "programs"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
# Allocations are the sanitizer's unit. Arguments and results get one each; what the ops of one program work in
# shares one, where it does not see one array run into the next.
# XLA's choice among its own products is left out: its comparison of them reads memory that nothing wrote.
SANITIZER_ENVIRONMENT = CACHE | {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "JAX_TT_METHOD": "native",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
# XLA captures even a single operation in a command buffer, where an operation that allocates or waits would fail.
CAPTURE_ENVIRONMENT = CACHE | {"XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1"}
# Seconds of each part, in the order of their value.
BENCHMARKS = {
    "gpu_peaks": 20,
    "gpu_headline": 55,
    "gpu_dense": 80,
    "gpu_tables": 125,
    "gpu_hash": 20,
    "gpu_bags": 10,
}
LAST_BENCHMARKS = {"gpu_ecorec": 35, "gpu_elrec": 45}
# The quick tier, and then what takes longer.
TESTS = {"tests": ("quick", "gpu", 120), "more tests": ("ci", "gpu and slow", 90)}
SANITIZERS = {"memcheck": 30, "racecheck": 30}
# XLA's compiler crashes under these tools, so that they find all programs compiled.
COMPILED_FOR_SANITIZERS = "compiled for sanitizers", 50
# What the sanitizers run: every kernel of a step, and little else.
SANITIZED = ("small", "together")
MOST_WORKERS = 12


def stages(dry: bool, results: Path) -> list[Stage]:
    """All stages, the most valuable first; small ones in a dry run."""
    python = sys.executable
    ops = ["others"] if dry else ["small", "together", "keys"]
    smi = ["nvidia-smi", "-q", "-d", "CLOCK,PERFORMANCE,MEMORY"]
    found = [Stage("card", [python, "-c", "print('no GPU')"] if dry else smi, 5)]
    found.append(Stage("operations", [python, "-m", "tests.native.gpu_run", *ops], 40, CACHE))

    def benchmark(case: str, seconds: float) -> Stage:
        command = [python, "-m", "benchmarks.one", case, str(BUILD / "case.json")]
        command += ["--log", str(results), *["--quick"] * dry]
        return Stage(case, command, seconds, CACHE)

    found += [benchmark(case, seconds) for case, seconds in BENCHMARKS.items()]
    found += [
        Stage(name, _tests(python, tier, marks, dry), seconds, CAPTURE_ENVIRONMENT)
        for name, (tier, marks, seconds) in TESTS.items()
    ]
    name, seconds = COMPILED_FOR_SANITIZERS
    found.append(Stage(name, _sanitized(python, None, dry), seconds, SANITIZER_ENVIRONMENT))
    found += [
        Stage(kind, _sanitized(python, kind, dry), seconds, SANITIZER_ENVIRONMENT)
        for kind, seconds in SANITIZERS.items()
    ]
    return found + [benchmark(case, seconds) for case, seconds in LAST_BENCHMARKS.items()]


def _tests(python: str, tier: str, marks: str, dry: bool) -> list[str]:
    command = [python, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "-m", marks]
    if dry:
        return [*command, "tests/lookup/test_vmap.py"]
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    return [*command, f"--tier={tier}", "-n", str(workers), "--dist=worksteal", "tests"]


def _sanitized(python: str, kind: str | None, dry: bool) -> list[str]:
    """The operations, under a tool that looks at this project's kernels alone; in a dry run without it."""
    ops = [python, "-m", "tests.native.gpu_run", *(("others",) if dry else SANITIZED)]
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/opt/nvidia/compute-sanitizer"
    )
    if dry or kind is None:
        return ops
    name = ["--kernel-name", "kernel_substring=jax_tt"]
    return [tool or "compute-sanitizer", "--tool", kind, "--error-exitcode", "7", *name, *ops]


def modules(check: Run, dry: bool) -> bool:
    """Takes prebuilt modules, or builds some; whether there are any. In every run, since machines may be fresh."""
    place = Stage("modules", [sys.executable, "-m", "scripts.gpu_bundle", "--place"], 20)
    if not BUNDLE.exists():
        check.note(Outcome("modules", "skipped", detail=f"no {BUNDLE.relative_to(ROOT)}"))
    elif check.run(place, 60):
        return True
    if dry:
        return True  # with what is here
    folder = BUILD / "native"
    options = {
        "Python_EXECUTABLE": sys.executable,
        "JAX_TT_CUDA": "ON",
        "JAX_TT_CUDA_ARCHITECTURES": "90-real",
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    defines = [f"-D{name}={value}" for name, value in options.items()]
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), *generator, *defines]
    command = ["cmake", "--build", str(folder), "--target", "in_tree"]
    command += ["--parallel", str(os.cpu_count())]
    return check.run(Stage("configure", configure, 15), 60) and check.run(
        Stage("build", command, 60), 300
    )


def folder_of(folder: Path, about: dict[str, Any]) -> Path:
    """Where a folder of several cards and commits has what was run."""
    words = [machine.slug_of(about["gpu"]), about["commit"], *["dry"] * about["dry"]]
    return folder / "-".join(words)


def begin(seconds: float, out: Path, about: dict[str, Any], earlier: Path | None) -> Run:
    """A run that has the outcomes and the rows of an earlier one: that in `out`, or else that in `earlier`."""
    out.mkdir(parents=True, exist_ok=True)
    if earlier is None:
        for name in (STAGES, ROWS, "log.txt"):
            (out / name).unlink(missing_ok=True)
        return Run(seconds, out, about)
    folder = out if (out / ROWS).exists() or (out / STAGES).exists() else earlier
    check = Run(seconds, out, about, folder / STAGES)
    if check.outcomes and folder != out and (folder / ROWS).exists():
        shutil.copy(folder / ROWS, out)
    return check


def cases_of(rows: Path) -> dict[str, dict[str, Any]]:
    """The cases in a log of rows; of one that ran twice the run with more rows, and the later one of equal ones."""
    cases: dict[str, dict[str, Any]] = {}
    now: dict[str, dict[str, Any]] = {}
    lines = rows.read_text().splitlines() if rows.exists() else []
    for line in lines:
        try:
            part = json.loads(line)
        except json.JSONDecodeError:  # the process was killed while it wrote
            continue
        name = part.pop("case")
        ((kind, value),) = part.items()
        if kind == "title":
            now[name] = {"title": value, "rows": [], "figures": [], "notes": [], "finished": False}
        elif kind == "finished":
            now[name]["finished"] = value
        else:
            now[name][kind].append(value)
        if name not in cases or len(now[name]["rows"]) >= len(cases[name]["rows"]):
            cases[name] = now[name]
    return cases


def write_results(rows: Path, out: Path, about: dict[str, Any]) -> None:
    """The cases so far as a results file, like those of ``benchmarks/results``."""
    found = machine.describe() | {"gpu": about["gpu"] or "none"}
    cases = {
        name: case | {"commit": about["commit"], "date": about["date"], "quick": about["dry"]}
        for name, case in cases_of(rows).items()
    }
    save(out, {"machine": found, "cases": cases})


def report(check: Run, rows: Path, about: dict[str, Any]) -> str:
    kind = (
        "Dry run of the GPU check, whose figures mean nothing" if about["dry"] else "The GPU check"
    )
    lines = [f"# {kind}: {about['gpu'] or 'no GPU'}, commit {about['commit']}", ""]
    lines += ["| stage | outcome | seconds |", "| --- | --- | --- |"]
    outcomes = check.outcomes.values()
    lines += [f"| {each.name} | {each.outcome} | {each.seconds:.0f} |" for each in outcomes]
    for each in outcomes:
        lines += ["", f"## {each.name}: {each.outcome}", "", "```", each.detail, "```"]
    keys = ("title", "rows", "figures", "notes")
    for case in cases_of(rows).values():
        whole = "" if case["finished"] else "\nnote: this case did not end"
        lines += ["", f"```\n{Report.from_json({key: case[key] for key in keys})}{whole}\n```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=780, help="for all of it")
    parser.add_argument("--out", type=Path, default=BUILD, help="folder of the results")
    parser.add_argument(
        "--earlier", type=Path, default=BUILD / "earlier", help="folder of the runs to continue"
    )
    parser.add_argument("--only", default="", help="stages, separated by commas")
    parser.add_argument("--commit", help="of the sources; by default what git says")
    parser.add_argument("--date", default="", help="of the measurement")
    parser.add_argument("--restart", action="store_true", help="all stages, whatever passed before")
    parser.add_argument("--dry-run", action="store_true", help="small work on what is here")
    arguments = parser.parse_args()
    dry, gpu = arguments.dry_run, machine.gpu_name()
    if gpu is None and not dry:
        print("gpu-check: nvidia-smi names no GPU; nothing to check here")
        return 1
    commit = arguments.commit or machine.commit()
    about = {"dry": dry, "gpu": gpu, "commit": commit}
    print("a dry run" if dry else f"{gpu}, {machine.versions()}", flush=True)
    # Two checkouts with changes to one commit may differ.
    anew = arguments.restart or commit.endswith("+changes")
    out, earlier = (folder_of(folder, about) for folder in (arguments.out, arguments.earlier))
    check = begin(arguments.seconds, out, about, None if anew else earlier)
    rows = out / ROWS
    date = {"date": arguments.date or datetime.datetime.now(datetime.UTC).date().isoformat()}

    def write() -> None:
        write_results(rows, out / f"{machine.slug_of(gpu)}.json", about | date)
        replace(out / "report.md", report(check, rows, about))
        earlier.mkdir(parents=True, exist_ok=True)
        for name in (STAGES, ROWS):
            if (out / name).exists():
                shutil.copy(out / name, earlier)

    check.listener = write
    only = [name for name in arguments.only.split(",") if name]
    known = stages(dry, rows)
    unknown = set(only) - {stage.name for stage in known}
    if unknown:
        sys.exit(f"--only: no stage called {', '.join(sorted(unknown))}")
    if modules(check, dry):
        check.all([stage for stage in known if not only or stage.name in only])
    print(f"\n{report(check, rows, about)}\nreport: {out / 'report.md'}")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
