"""All checks that need a GPU, in at most ten minutes on a bare machine without network.

    python3 scripts/gpu_check.py --out somewhere
    python3 scripts/gpu_check.py --dry-run            # without a GPU, to test this script

Builds the native modules with this Python's tools, runs the tests marked ``gpu``, measures the benchmarks, and runs the
ops under compute-sanitizer in what time is left; writes benchmarks/results/<gpu>.json and a report. A stage that fails,
or for which no time is left, does not stop the next. Exit status 1 where one failed.
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import time
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
# initcheck must see every write, those of XLA's kernels too, and takes longest; the others look at ours alone.
SANITIZERS = {
    "memcheck": ["--kernel-name", "kernel_substring=jax_tt"],
    "racecheck": ["--kernel-name", "kernel_substring=jax_tt"],
    "initcheck": [],
}


@dataclasses.dataclass
class Stage:
    """One stage's outcome; `log` is what it printed."""

    name: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome == "FAILED"


class Check:
    """Runs stages within one budget of time and records their outcomes."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.stages: list[Stage] = []
        (BUILD / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def run(
        self,
        name: str,
        command: list[str | Path],
        limit: float,
        environment: dict[str, str] | None = None,
    ) -> bool:
        """Runs a command; its output goes to the terminal's log file, the last lines to the report."""
        limit = min(limit, self.left)
        if limit < 10:
            self.stages.append(Stage(name, "skipped", detail="no time left"))
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
        self.stages.append(Stage(name, outcome, seconds, detail))
        return not status

    def skip(self, name: str, reason: str) -> None:
        print(f"==> {name}: skipped, {reason}", flush=True)
        self.stages.append(Stage(name, "skipped", detail=reason))


def build(check: Check) -> bool:
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
        "configure", ["cmake", "-S", ROOT, "-B", folder, *generator, *defines], 60
    )
    command = ["cmake", "--build", folder, "--target", "in_tree", "--parallel", str(os.cpu_count())]
    return configured and check.run("build", command, 300)


def sanitize(check: Check) -> None:
    """Runs the operations under each tool. They share the remaining time; what one does not use is left to the next."""
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


def report(check: Check, results: Path) -> str:
    lines = [f"# GPU check: {machine.gpu_name() or 'no GPU'}, commit {machine.commit()}", ""]
    lines += ["| stage | outcome | seconds |", "| --- | --- | --- |"]
    lines += [f"| {s.name} | {s.outcome} | {s.seconds:.0f} |" for s in check.stages]
    for stage in check.stages:
        lines += ["", f"## {stage.name}: {stage.outcome}", "", "```", stage.detail, "```"]
    if results.exists():
        from benchmarks.results import Report, load

        cases = load(results)["cases"]
        lines += ["", *(f"```\n{Report.from_json(_report(c))}\n```" for c in cases.values())]
    return "\n".join(lines) + "\n"


def _report(case: dict) -> dict:
    return {key: case[key] for key in ("title", "rows", "figures", "notes")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="for all of it")
    parser.add_argument(
        "--out", type=Path, default=BUILD, help="where report and results are copied"
    )
    parser.add_argument(
        "--only", default="build,tests,sanitizer,benchmarks", help="stages, separated by commas"
    )
    parser.add_argument("--dry-run", action="store_true", help="small work on what is here")
    arguments = parser.parse_args()
    stages = arguments.only.split(",")
    check = Check(arguments.minutes)
    if arguments.dry_run:
        return dry_run(check, stages, arguments.out)
    gpu = machine.gpu_name()
    if gpu is None:
        print("gpu-check: nvidia-smi names no GPU; nothing to check here")
        return 1
    print(f"{gpu}, {machine.versions()}", flush=True)
    results = ROOT / "benchmarks" / "results" / f"{machine.gpu_slug()}.json"
    if "build" not in stages or build(check):
        if "tests" in stages:
            workers = ["-n", str(min(6, os.cpu_count() or 1))]
            if subprocess.run(
                [sys.executable, "-c", "import xdist"], capture_output=True
            ).returncode:
                workers = []
            command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *workers, "tests"]
            check.run("tests", command, 240)
        if "benchmarks" in stages:
            # The headline first: what is left of the time may not do for all.
            for case in ("gpu_headline", "gpu_elrec", "gpu_ecorec"):
                command = [sys.executable, "-m", "benchmarks.run", "--gpu", "--only", case]
                check.run(case, command, 120)
        if "sanitizer" in stages:
            sanitize(check)
    return finish(check, results, arguments.out)


def dry_run(check: Check, stages: list[str], out: Path) -> int:
    """The same stages except the build, with the existing native modules."""
    results = BUILD / "dry-run.json"
    results.unlink(missing_ok=True)
    if "tests" in stages:
        check.run(
            "tests", [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/test_vmap.py"], 120
        )
    if "sanitizer" in stages:
        check.skip("compute-sanitizer", "a dry run")
        check.run("ops", [sys.executable, "-m", "tests.gpu_run", "small", "cached"], 240)
    if "benchmarks" in stages:
        command = [
            sys.executable,
            "-m",
            "benchmarks.run",
            "--gpu",
            "--quick",
            "--only",
            "gpu_elrec",
        ]
        check.run("gpu_elrec", [*command, "--out", results], 240)
    return finish(check, results, out)


def finish(check: Check, results: Path, out: Path) -> int:
    text = report(check, results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(text)
    if results.exists() and results.parent != out:
        shutil.copy(results, out)
    print(f"\n{text}\nreport: {out / 'report.md'}")
    return 1 if any(stage.failed for stage in check.stages) else 0


if __name__ == "__main__":
    sys.exit(main())
