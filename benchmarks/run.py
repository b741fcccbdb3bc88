"""Times jax_tt against its peers, prints the tables and writes them as JSON.

python -m benchmarks.run                      # everything, into benchmarks/results/
python -m benchmarks.run --only headline,dense_step
python -m benchmarks.run --quick              # small sizes, to check that everything runs
python -m benchmarks.run --gpu                # what is measured on a GPU, into a file named after it
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.registry import Case, all_cases
from benchmarks.results import Report

RESULTS = machine.ROOT / "benchmarks" / "results"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    cases = {name: case for name, case in all_cases().items() if case.gpu == options.gpu}
    if options.list:
        print("\n".join(f"{case.name:16} {case.title}" for case in cases.values()))
        return 0
    chosen = _choose(cases, options.only)
    data = results.load(options.out)
    found = machine.describe()
    if options.gpu:
        found["gpu"] = machine.gpu_name() or "none"
    known = data.get("machine", found)
    what = ("gpu",) if options.gpu else ("cpu", "cores")
    if any(known[part] != found[part] for part in what):
        sys.exit(
            f"{options.out} was measured on {known[what[0]]}; give this machine another --name"
        )
    data["machine"] = found
    print(f"{machine.title(found)}, {found['versions']}", flush=True)
    failed = []
    for case in chosen:
        report, seconds = _run(case, quick=options.quick)
        if report is None:
            failed.append(case.name)
            continue
        print(f"\n{report}\n({seconds:.0f} s)", flush=True)
        data["cases"][case.name] = {**report.to_json(), **_provenance(options.quick)}
        results.save(options.out, data)
    print(f"\nwritten to {options.out}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases to run, separated by commas")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few calls each")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--gpu", action="store_true", help="the cases that are measured on a GPU")
    parser.add_argument(
        "--name", help="of the results file, without cpu-; by default the machine's"
    )
    parser.add_argument("--out", type=Path, help="the results file itself")
    options = parser.parse_args(arguments)
    if options.out is None:
        # Quick figures mean nothing: they never stand beside measured ones.
        folder = machine.ROOT / "build" / "benchmarks" if options.quick else RESULTS
        cpu = f"cpu-{options.name or machine.slug()}"
        name = options.name or machine.slug_of(machine.gpu_name()) if options.gpu else cpu
        options.out = folder / f"{name}.json"
    if options.gpu and not options.quick and machine.gpu_name() is None:
        sys.exit("--gpu: JAX sees no GPU here; --quick shows whether everything runs")
    return options


def _choose(cases: dict[str, Case], only: str) -> list[Case]:
    names = [name.strip() for name in only.split(",") if name.strip()] or list(cases)
    unknown = [name for name in names if name not in cases]
    if unknown:
        sys.exit(f"--only: no case called {', '.join(unknown)}; there are {', '.join(cases)}")
    return [cases[name] for name in names]


def _run(case: Case, *, quick: bool) -> tuple[Report | None, float]:
    """The report of a case and its time in seconds, from a separate process; None if that failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "benchmarks.one", case.name, str(path)]
        start = time.monotonic()
        status = subprocess.run(command + ["--quick"] * quick, cwd=machine.ROOT)
        seconds = time.monotonic() - start
        if status.returncode:
            print(f"{case.name} failed with exit status {status.returncode}", file=sys.stderr)
            return None, seconds
        return Report.from_json(json.loads(path.read_text())), seconds


def _provenance(quick: bool) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    return {"commit": machine.commit(), "date": now.date().isoformat(), "quick": quick}


if __name__ == "__main__":
    sys.exit(main())
