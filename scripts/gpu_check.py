"""All checks that need a GPU, in at most ten minutes on a bare machine without network.

    python3 scripts/gpu_check.py --out somewhere
    python3 scripts/gpu_check.py --dry-run            # without a GPU, to test this script

Builds the native modules with this Python's tools, measures, runs the tests marked ``gpu``, and runs the ops under
compute-sanitizer in what time is left: stage by stage, the most valuable first. After each stage the report, the
outcomes and the results of the benchmarks are written to ``--out``, so that a run which is stopped has what it did. The
next run of the same commit builds, and does the other stages and those that failed; ``--restart`` does all, and so does
a run on a checkout with changes. A stage that fails, or for which no time is left, does not stop the next. Exit status
1 where one failed.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402

BUILD = ROOT / "build" / "gpu-check"
# Allocations are the sanitizer's unit. Arguments and results get one each; what the ops of one program work in
# shares one, where it does not see one array run into the next.
# XLA's choice among its own products is left out: its comparison of them reads memory that nothing wrote.
SANITIZER_ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "JAX_TT_METHOD": "ffi",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}
# XLA captures even a single operation in a command buffer, where an operation that allocates or waits would fail.
CAPTURE_ENVIRONMENT = {"XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1"}
# initcheck must see every write, those of XLA's kernels too, and takes longest; the others look at ours alone.
SANITIZERS = {
    "memcheck": ["--kernel-name", "kernel_substring=jax_tt"],
    "racecheck": ["--kernel-name", "kernel_substring=jax_tt"],
    "initcheck": [],
}


# The headline first: what is left of the time may not do for all.
BENCHMARKS = (
    "gpu_headline",
    "gpu_headline_zipf",
    "gpu_dense",
    "gpu_tables",
    "gpu_elrec",
    "gpu_ecorec",
)


@dataclasses.dataclass
class Stage:
    """One stage's outcome; `detail` is the end of what it printed."""

    name: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome == "FAILED"


class Check:
    """Runs stages within one budget of time, and writes their outcomes after each.

    Args:
        minutes: for all stages.
        out: folder of outcomes, report and results.
        results: file that benchmarks write.
        run: the commit, and whether it is a dry run; outcomes of another run are not continued, and none where the
            checkout has changes, since those of the earlier run may have been others.
        restart: whether to begin anew in any case.
    """

    def __init__(
        self, minutes: float, out: Path, results: Path, run: dict[str, object], restart: bool
    ) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.out, self.results, self._run = out, results, run
        self.stages: dict[str, Stage] = {}
        (BUILD / "logs").mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        restart |= str(run["commit"]).endswith("+changes")
        if self._outcomes.exists() and not restart:
            known = json.loads(self._outcomes.read_text())
            if known["run"] == run:
                self.stages = {stage["name"]: Stage(**stage) for stage in known["stages"]}

    @property
    def _outcomes(self) -> Path:
        return self.out / "stages.json"

    @property
    def dry(self) -> bool:
        return bool(self._run["dry"])

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def failed(self) -> bool:
        return any(stage.failed for stage in self.stages.values())

    def has(self, name: str) -> bool:
        """Whether a stage passed, in this run or the one that it continues."""
        return name in self.stages and self.stages[name].outcome == "passed"

    def run(
        self,
        name: str,
        command: Sequence[str | Path],
        limit: float,
        environment: dict[str, str] | None = None,
        again: bool = False,
    ) -> bool:
        """Runs a command, unless it has passed and is not wanted `again`; its output goes to a log file, the last lines
        to the report."""
        if self.has(name) and not again:
            print(f"==> {name}: passed before", flush=True)
            return True
        limit = min(limit, self.left)
        if limit < 10:
            self._note(Stage(name, "skipped", detail="no time left"))
            return False
        print(f"==> {name}", flush=True)
        log = BUILD / "logs" / f"{name.replace(' ', '-')}.txt"
        start = time.monotonic()
        with log.open("w") as output:
            try:
                status = subprocess.run(
                    [str(part) for part in command],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"stopped after {limit:.0f} s"
        seconds = time.monotonic() - start
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        print(tail, flush=True)
        outcome = "FAILED" if status else "passed"
        detail = (
            f"exit status {status}\n{tail}" if status else tail.splitlines()[-1] if tail else ""
        )
        self._note(Stage(name, outcome, seconds, detail))
        return not status

    def skip(self, name: str, reason: str) -> None:
        print(f"==> {name}: skipped, {reason}", flush=True)
        self._note(Stage(name, "skipped", detail=reason))

    def _note(self, stage: Stage) -> None:
        self.stages.pop(stage.name, None)  # one that failed before: now it is the last
        self.stages[stage.name] = stage
        known = {
            "run": self._run,
            "stages": [dataclasses.asdict(each) for each in self.stages.values()],
        }
        if self.results.exists() and self.results.parent != self.out:
            shutil.copy(self.results, self.out)
        _replace(self.out / "report.md", report(self))
        _replace(self._outcomes, json.dumps(known, indent=1))


def _replace(path: Path, text: str) -> None:
    """Writes a file that a kill cannot leave half written."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def build(check: Check) -> bool:
    """Configures and builds, in a continued run too: where nothing changed that takes a second."""
    folder = BUILD / "native"
    options = {
        "Python_EXECUTABLE": sys.executable,
        "JAX_TT_CUDA": "ON",
        "JAX_TT_CUDA_ARCHITECTURES": "native",
        "JAX_TT_CUDA_LINEINFO": "ON",
        "JAX_TT_WERROR": "ON",
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    defines = [f"-D{name}={value}" for name, value in options.items()]
    configured = check.run(
        "configure", ["cmake", "-S", ROOT, "-B", folder, *generator, *defines], 60, again=True
    )
    command = ["cmake", "--build", folder, "--target", "in_tree", "--parallel", str(os.cpu_count())]
    return configured and check.run("build", command, 300, again=True)


def sanitize(check: Check) -> None:
    """Runs the operations under each tool. They share the remaining time; what one does not use is left to the next."""
    if check.dry:
        check.skip("compute-sanitizer", "a dry run")
        check.run("ops", [sys.executable, "-m", "tests.gpu_run", "small", "cached"], 240)
        return
    tool = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/opt/nvidia/compute-sanitizer"
    )
    for done, (kind, options) in enumerate(SANITIZERS.items()):
        if tool is None:
            check.skip(kind, "compute-sanitizer is not installed")
            continue
        command = [tool, "--tool", kind, "--error-exitcode", "7", *options]
        command += [sys.executable, "-m", "tests.gpu_run"]
        check.run(kind, command, check.left / (len(SANITIZERS) - done), SANITIZER_ENVIRONMENT)


def report(check: Check) -> str:
    kind = "Dry run of the GPU check, whose figures mean nothing" if check.dry else "GPU check"
    lines = [f"# {kind}: {machine.gpu_name() or 'no GPU'}, commit {machine.commit()}", ""]
    lines += ["| stage | outcome | seconds |", "| --- | --- | --- |"]
    lines += [f"| {s.name} | {s.outcome} | {s.seconds:.0f} |" for s in check.stages.values()]
    for stage in check.stages.values():
        lines += ["", f"## {stage.name}: {stage.outcome}", "", "```", stage.detail, "```"]
    if check.results.exists():
        from benchmarks.results import Report, load

        cases = load(check.results)["cases"]
        lines += ["", *(f"```\n{Report.from_json(_report(c))}\n```" for c in cases.values())]
    return "\n".join(lines) + "\n"


def _report(case: dict) -> dict:
    return {key: case[key] for key in ("title", "rows", "figures", "notes")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument("--out", type=Path, default=BUILD, help="where everything is written")
    parser.add_argument(
        "--only", default="build,benchmarks,tests,sanitizer", help="parts, separated by commas"
    )
    parser.add_argument("--restart", action="store_true", help="all stages, whatever passed before")
    parser.add_argument("--dry-run", action="store_true", help="small work on what is here")
    arguments = parser.parse_args()
    dry, gpu = arguments.dry_run, machine.gpu_name()
    if gpu is None and not dry:
        print("gpu-check: nvidia-smi names no GPU; nothing to check here")
        return 1
    print("a dry run" if dry else f"{gpu}, {machine.versions()}", flush=True)
    slug = machine.gpu_slug()
    results = BUILD / "dry-run.json" if dry else ROOT / "benchmarks" / "results" / f"{slug}.json"
    run = {"dry": dry, "gpu": gpu, "commit": machine.commit()}
    check = Check(arguments.minutes, arguments.out, results, run, arguments.restart)
    if dry and not check.stages:
        results.unlink(missing_ok=True)
    parts = arguments.only.split(",")
    if "build" not in parts or dry or build(check):
        steps: dict[str, Callable[[Check], None]] = {
            "benchmarks": measure,
            "tests": test,
            "sanitizer": sanitize,
        }
        for part, step in steps.items():
            if part in parts:
                step(check)
    print(f"\n{report(check)}\nreport: {arguments.out / 'report.md'}")
    return 1 if check.failed else 0


def measure(check: Check) -> None:
    """The benchmarks, a stage for each case; quick ones in a dry run."""
    for case in BENCHMARKS:
        command = [sys.executable, "-m", "benchmarks.run", "--gpu", "--only", case]
        if check.dry:
            command += ["--quick", "--out", str(check.results)]
        check.run(case, command, 240 if check.dry else 120)


def test(check: Check) -> None:
    """The tests that a GPU runs; in a dry run a few of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    if check.dry:
        check.run("tests", [*command, "tests/test_vmap.py"], 120)
        return
    if not subprocess.run([sys.executable, "-c", "import xdist"], capture_output=True).returncode:
        command += ["-n", str(min(6, os.cpu_count() or 1))]
    check.run("tests", [*command, "tests"], 240, CAPTURE_ENVIRONMENT)


if __name__ == "__main__":
    sys.exit(main())
