"""The scripts around a GPU: the check of a GPU machine runs without one, what compilers and gcov say is read right."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import cuda_coverage, gpu_check, kernel_resources, mutants
from scripts.kernel_resources import Kernel, Multiprocessor

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.full
def test_gpu_check_runs_dry(tmp_path):
    command = [sys.executable, "scripts/gpu_check.py", "--dry-run", "--out", str(tmp_path)]
    command += ["--minutes", "14"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    text = (tmp_path / "report.md").read_text()
    stages = re.findall(r"^\| (\w[\w-]*) \| (passed|skipped|FAILED) \|", text, re.MULTILINE)
    assert stages == [
        *((case, "passed") for case in gpu_check.BENCHMARKS),
        ("tests", "passed"),
        ("compute-sanitizer", "skipped"),
        ("ops", "passed"),
    ]
    assert "# Dry run" in text and "jax_tt fused step" in text
    cases = json.loads((tmp_path / "dry-run.json").read_text())["cases"]
    assert list(cases) == list(gpu_check.BENCHMARKS) and all(c["quick"] for c in cases.values())


def check_of(folder, commit="a", restart=False):
    run = {"dry": True, "gpu": None, "commit": commit}
    return gpu_check.Check(5, folder, folder / "results.json", run, restart)


def test_gpu_check_goes_on_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "BUILD", tmp_path / "build")
    note = tmp_path / "ran.txt"

    def stage(name, then=""):
        text = f"open({str(note)!r}, 'a').write({name + ' '!r}); {then}"
        return [sys.executable, "-c", text]

    # The process of the check is killed while its third stage runs.
    program = f"""
import sys
from pathlib import Path
from scripts import gpu_check
gpu_check.BUILD = Path({str(tmp_path / "build")!r})
run = {{"dry": True, "gpu": None, "commit": "a"}}
check = gpu_check.Check(5, Path({str(tmp_path)!r}), Path({str(tmp_path / "results.json")!r}), run, False)
check.run("one", {stage("one")!r}, 60)
check.run("two", {stage("two", "raise SystemExit(3)")!r}, 60)
check.run("three", {stage("three", "import os; os.kill(os.getppid(), 9)")!r}, 60)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    report = (tmp_path / "report.md").read_text()
    assert "| one | passed |" in report and "| two | FAILED |" in report and "three" not in report

    check = check_of(tmp_path)
    assert check.has("one") and not check.has("two") and check.failed
    for name in ("one", "two", "three"):
        assert check.run(name, stage(name), 60)
    assert note.read_text().split() == ["one", "two", "three", "two", "three"]
    assert not check.failed and set(check_of(tmp_path).stages) == {"one", "two", "three"}
    # Another commit, or a restart, begins anew.
    assert not check_of(tmp_path, commit="b").stages and not check_of(tmp_path, restart=True).stages


def test_gpu_check_does_not_measure_a_stale_module(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "BUILD", tmp_path / "build")
    commands = tmp_path / "commands.txt"
    for tool in ("cmake", "ninja"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "$1" >> {commands}\n')
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for _ in range(2):
        assert gpu_check.build(check_of(tmp_path))
    assert commands.read_text().split() == ["-S", "--build"] * 2
    assert check_of(tmp_path).has("build")
    # Two checkouts with changes to one commit may differ.
    assert gpu_check.build(check_of(tmp_path, commit="a+changes"))
    assert not check_of(tmp_path, commit="a+changes").stages


def test_gpu_check_without_a_gpu_says_so():
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(Path.home())},
        timeout=60,
    )
    assert done.returncode == 1 and "no GPU" in done.stdout


LOG = """\
ptxas info    : Compiling entry function '_Z6kernelPf' for 'sm_90'
ptxas info    : Function properties for _Z6kernelPf
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z5otherPf' for 'sm_90'
ptxas info    : Function properties for _Z5otherPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""
PTX = """\
.visible .entry _Z6kernelPf(
\t.param .u64 .ptr .align 1 _Z6kernelPf_param_0
)
.maxntid 256, 1, 1
{
.visible .entry _Z5otherPf(
\t.param .u64 .ptr .align 1 _Z5otherPf_param_0
)
{
"""


def test_resources_are_read_as_the_compiler_prints_them():
    names = {"_Z6kernelPf": "kernel<float, 4>", "_Z5otherPf": "other"}
    kernels = kernel_resources.parse(LOG, PTX, names)
    assert kernels == [Kernel("kernel<float, 4>", 96, 8, 28, 256), Kernel("other", 32, 0, 0, 1024)]
    table = kernel_resources.table({"90": kernels})
    assert "| `kernel` | 1 | 256 | 96 | 8 B | 28 B | 25% |" in table
    assert "| `other` | 1 | 1024 | 32 | none | none | 100% |" in table
    assert kernel_resources.spilling({"90": kernels}) == ["kernel<float, 4> on sm_90: 28 bytes"]


def test_occupancy():
    sm = Multiprocessor()
    assert sm.resident(32, 1024) == 2  # threads
    assert sm.resident(128, 256) == 2  # registers: 64 K over 128 x 256
    assert sm.resident(255, 256) == 1
    assert sm.resident(16, 32) == 32  # blocks


KERNEL = """\
template <typename T>
__global__ void __launch_bounds__(64) Kernel(T* p) {
  if (p == nullptr)
    return;

  return;
}
"""


def test_coverage_is_summed_over_compiled_sources_and_instances(tmp_path):
    (tmp_path / "a.cu").write_text(KERNEL)

    def report(symbol, executed, lines):
        function = {"name": symbol, "execution_count": executed}
        counted = [{"line_number": n, "count": c} for n, c in lines]
        files = [
            {"file": "a.cu", "functions": [function], "lines": counted},
            {"file": "/usr/include/vector", "functions": [], "lines": counted},
        ]
        return {"current_working_directory": str(tmp_path), "files": files}

    # Of float and of double; the second never runs.
    reports = [
        report("_Z6KernelIfEvPT_", 2, [(2, 2), (3, 2), (4, 0), (6, 0)]),
        report("_Z6KernelIdEvPT_", 0, [(2, 0), (3, 0), (4, 0), (6, 0)]),
    ]
    counts = cuda_coverage.merge(reports, tmp_path)
    (counted,) = counts.values()
    assert counted.lines == {2: 2, 3: 2, 4: 0, 6: 0}
    assert counted.never == [4, 6]
    text = cuda_coverage.page(counts, ["tests/test_x.py"], "3 passed")
    assert "| `a.cu` | 4 | 2 | 50.0 % |" in text
    assert "| `Kernel` | `a.cu` | 2 | 1 |" in text and "never executed: `Kernel<double>`" in text
    assert "   4      return;" in text and "`test_x.py`" in text and "3 passed" in text


def test_a_source_with_all_lines_executed_is_not_rounded_up():
    assert cuda_coverage.share(1999, 2000) == "99.9 %"
    assert cuda_coverage.share(2000, 2000) == "100.0 %"
    assert cuda_coverage.share(0, 0) == "no code"


@pytest.mark.parametrize("mutant", mutants.MUTANTS.values(), ids=mutants.MUTANTS)
def test_a_mutant_has_its_place_and_tests_to_notice_it(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert all((ROOT / f"tests/test_{name}.py").exists() for name in mutant.tests.split())
