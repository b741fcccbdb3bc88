"""The check of a GPU machine, without one: nothing that was measured is lost, and modules fit or are refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import registry
from scripts import gpu_bundle, gpu_check
from scripts.staged import Outcome, Run, Stage

pytestmark = pytest.mark.unsampled

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"dry": True, "gpu": None, "commit": "a"}


def stage(name, text="", seconds=1.0):
    return Stage(name, [sys.executable, "-c", text], seconds)


def gone(pid):
    """Whether a process has ended, at the latest in ten seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.1)
    return False


# One row after another, each of which is announced when it is written.
ROWS = """
import json, os, sys, time
print("pid", os.getpid(), flush=True)
for k in range(1000):
    with open(sys.argv[1], "a") as file:
        if k == 0:
            file.write(json.dumps({"case": "slow", "title": "Slow"}) + "\\n")
        row = {"work": str(k), "contender": "", "median_ms": 1.0, "lower_ms": 1.0, "upper_ms": 1.0,
               "fastest_ms": 1.0, "calls": 1}
        file.write(json.dumps({"case": "slow", "rows": row}) + "\\n")
        file.flush()
        os.fsync(file.fileno())
    print("row", k, flush=True)
    time.sleep(0.01)
"""


def test_a_kill_leaves_every_row_and_no_process(tmp_path):
    program = f"""
import sys
from pathlib import Path
from scripts.staged import Run, Stage
out = Path({str(tmp_path)!r})
run = Run(600, out, {ABOUT!r})
run.all([Stage("quick", [sys.executable, "-c", ""], 1),
         Stage("slow", [sys.executable, "-c", {ROWS!r}, str(out / "rows.jsonl")], 60)])
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    log = tmp_path / "log.txt"
    end = time.monotonic() + 60
    while not (log.exists() and "row 0" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    child = int(re.search(r"pid (\d+)", log.read_text())[1])
    assert gone(child)
    announced = [int(k) for k in re.findall(r"row (\d+)\n", log.read_text())]
    rows = gpu_check.cases_of(tmp_path / "rows.jsonl")["slow"]["rows"]
    assert [int(row["work"]) for row in rows][: len(announced)] == announced
    run = Run(600, tmp_path, ABOUT, tmp_path / "stages.json")
    assert run.passed("quick") and not run.passed("slow")
    assert "Slow" in gpu_check.report(run, tmp_path / "rows.jsonl", ABOUT)


def test_a_stage_that_takes_too_long_ends_with_all_its_processes(tmp_path):
    text = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); "
    text += "print('child', c.pid, flush=True); c.wait()"
    run = Run(600, tmp_path, ABOUT)
    assert not run.run(stage("stuck", text), 2)
    child = int(re.search(r"child (\d+)", (tmp_path / "log.txt").read_text())[1])
    assert gone(child)
    assert run.outcomes["stuck"].outcome == "stopped" and run.failed
    assert "stopped after 2 s" in run.outcomes["stuck"].detail


def test_a_later_run_does_what_never_ran_and_then_what_failed(tmp_path):
    stages = [stage("one"), stage("two", "raise SystemExit(3)"), stage("three")]
    run = Run(600, tmp_path, ABOUT)
    run.all(stages[:2])
    assert run.passed("one") and run.outcomes["two"].outcome == "FAILED"
    again = Run(600, tmp_path, ABOUT, tmp_path / "stages.json")
    assert [each.name for each in again.order(stages)] == ["three", "two"]
    again.all([stages[0], stage("two"), stages[2]])
    assert not again.failed and set(again.outcomes) == {"one", "two", "three"}
    # Another commit begins anew.
    assert not Run(600, tmp_path, ABOUT | {"commit": "b"}, tmp_path / "stages.json").outcomes


def test_a_stage_without_time_is_skipped_and_keeps_its_earlier_outcome(tmp_path):
    run = Run(30, tmp_path, ABOUT)
    run.note(Outcome("failed before", "FAILED"))
    run.all([stage("long", seconds=60), stage("short"), stage("failed before", seconds=60)])
    outcomes = {name: each.outcome for name, each in run.outcomes.items()}
    assert outcomes == {"failed before": "FAILED", "long": "skipped", "short": "passed"}


def test_an_earlier_run_is_continued_in_another_folder(tmp_path):
    first, second, earlier = (tmp_path / name for name in ("first", "second", "earlier"))
    run = gpu_check.begin(60, earlier, ABOUT, None)
    run.note(Outcome("card", "passed"))
    (earlier / gpu_check.ROWS).write_text('{"case": "x", "title": "X"}\n{"case": "x", "no')
    assert gpu_check.begin(60, first, ABOUT, earlier).passed("card")
    assert list(gpu_check.cases_of(first / gpu_check.ROWS)) == ["x"]
    other = ABOUT | {"commit": "b"}
    assert not gpu_check.begin(60, second, other, earlier).outcomes
    assert not (second / gpu_check.ROWS).exists()
    assert not gpu_check.begin(60, earlier, ABOUT, None).outcomes  # a restart
    assert not (earlier / gpu_check.ROWS).exists()


def test_cards_in_turn_lose_nothing(tmp_path):
    for turn, gpu in enumerate(["NVIDIA H100", "NVIDIA H200", "NVIDIA H100"]):
        about = ABOUT | {"gpu": gpu}
        out, earlier = (gpu_check.folder_of(tmp_path / name, about) for name in ("out", "earlier"))
        run = gpu_check.begin(60, out, about, earlier)
        assert run.passed("card") == (turn == 2)
        if turn < 2:
            run.note(Outcome("card", "passed"))
            (out / gpu_check.ROWS).write_text(f'{{"case": "{gpu}", "title": "X"}}\n')
        assert list(gpu_check.cases_of(out / gpu_check.ROWS)) == [gpu]


def test_the_stages_fit_into_the_time_of_a_gpu():
    stages = gpu_check.stages(False, Path("rows.jsonl"))
    assert sum(each.seconds for each in stages) + 20 <= 780  # 20 to load the modules
    names = [each.name for each in stages]
    cases = {name for name, case in registry.all_cases().items() if case.gpu}
    assert cases == set(gpu_check.BENCHMARKS) | set(gpu_check.LAST_BENCHMARKS)
    assert cases <= set(names) and len(names) == len(set(names))
    # The first run of 450 seconds ends ahead of the tests.
    first = sum(each.seconds for each in stages[: names.index("tests")]) + 20
    assert first <= 440 - 8
    assert [each.name for each in gpu_check.stages(True, Path("rows.jsonl"))] == names


def test_the_case_with_more_rows_is_kept(tmp_path):
    log = tmp_path / "rows.jsonl"
    parts = [("title", "A"), ("notes", "first"), ("rows", 1), ("rows", 2)]
    parts += [("title", "A"), ("notes", "second"), ("rows", 3)]
    lines = [json.dumps({"case": "a", kind: value}) for kind, value in parts]
    log.write_text("\n".join(lines))
    assert gpu_check.cases_of(log)["a"]["rows"] == [1, 2]
    log.write_text("\n".join([*lines, json.dumps({"case": "a", "rows": 4}), '{"case": "a", "ro']))
    assert gpu_check.cases_of(log)["a"]["notes"] == ["second"]


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(Path.home())},
        timeout=60,
    )
    assert done.returncode == 1 and "no GPU" in done.stdout


@pytest.mark.slow
def test_a_dry_run_measures_and_reports(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "scripts/gpu_check.py", "--dry-run", "--out", str(out)]
    command += [
        "--only",
        "card,gpu_ecorec",
        "--commit",
        "a",
        "--earlier",
        str(tmp_path / "earlier"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    out /= "no-gpu-a-dry"
    outcomes = json.loads((out / "stages.json").read_text())["stages"]
    assert {"card", "gpu_ecorec"} <= {e["name"] for e in outcomes if e["outcome"] == "passed"}
    case = json.loads((out / "no-gpu.json").read_text())["cases"]["gpu_ecorec"]
    assert case["finished"] and case["quick"]
    contenders = {row["contender"] for row in case["rows"]}
    assert {"jax_tt forward", "jax_tt fused step", "XLA reference step"} <= contenders
    assert all(0 < row["fastest_ms"] <= row["median_ms"] for row in case["rows"])
    assert any("largest error of a gradient" in note for note in case["notes"])
    text = (out / "report.md").read_text()
    assert "# Dry run" in text and "jax_tt fused step" in text


@pytest.fixture
def bundle(tmp_path):
    """A bundle for this Python and these sources, whose modules are no modules."""
    described = gpu_bundle.describe(sys.executable)
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "bundle.json").write_text(json.dumps(described))
    for name in gpu_bundle.MODULES:
        (folder / f"{name}{described['suffix']}").write_bytes(b"new")
    return folder


def test_modules_of_a_bundle_are_placed(bundle, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    gpu_bundle.place(bundle, package)
    placed = {path.name: path.read_bytes() for path in package.iterdir()}
    suffix = gpu_bundle.describe(sys.executable)["suffix"]
    assert placed == {f"_cpu{suffix}": b"new", f"_cuda{suffix}": b"new"}


def test_a_bundle_for_something_else_is_refused(bundle, tmp_path):
    description = bundle / "bundle.json"
    found = json.loads(description.read_text())
    for key in ("suffix", "jax", "jaxlib", "sources"):
        description.write_text(json.dumps(found | {key: "other"}))
        message = f"was built for {key} other, and this is {found[key]}"
        with pytest.raises(RuntimeError, match=message):
            gpu_bundle.place(bundle, tmp_path)
    assert not list(tmp_path.glob("*.so*"))
    description.unlink()
    with pytest.raises(RuntimeError, match="make gpu-bundle"):
        gpu_bundle.place(bundle, tmp_path)


def test_a_bundle_that_is_too_large_to_travel_is_refused(bundle, monkeypatch):
    assert gpu_bundle.check_size(bundle) < 10_000
    monkeypatch.setattr(gpu_bundle, "MOST_BYTES", 5)
    with pytest.raises(RuntimeError, match=r"are to travel; build it for one architecture"):
        gpu_bundle.check_size(bundle)
