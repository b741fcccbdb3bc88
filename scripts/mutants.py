"""Mutation testing: plants faults, and lists the tests that notice each of them.

python -m scripts.mutants reach               builds the sources with all faults, and runs all tests once: which faults
                                              does each test reach, and what does it cost
python -m scripts.mutants catch               runs, for each fault, the tests that reach it, cheapest first, until two
                                              have failed: about three hours of two cores
python -m scripts.mutants catch adam clip     faults whose names contain one of these texts
python -m scripts.mutants catch --share 1/5   every fifth fault
python -m scripts.mutants table               writes tests/mutants.md: faults by room, and the tests that notice each

Everything lies in `build/mutants`: a copy of the checkout with the faults of `mutants_python.py` and
`mutants_native.py`, each behind a switch (see `mutant.py`), its native modules, and the results. A later call copies
and builds what has changed, and goes on where an earlier one has ended. `--tests FOLDER --suite NAME` takes the tests
of another checkout, with results of their own, to compare a suite with an earlier one.
"""

import argparse
import concurrent.futures
import contextlib
import fractions
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import venv
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from scripts.mutant import Mutant, plant
from scripts.mutants_native import NATIVE
from scripts.mutants_python import PYTHON
from scripts.native_build import ROOT, build, configure

BUILD = ROOT / "build" / "mutants"
ENVIRONMENT = BUILD / "environment"
TABLE = ROOT / "tests" / "mutants.md"
MUTANTS = (*NATIVE, *PYTHON)
WANTED = 2  # tests that fail
# Of one fault: the tests that are run, and the seconds that they may take without it.
MOST_TESTS, MOST_SECONDS = 1000, 600.0
# A fault may let a loop go on for ever.
TIMEOUT_S = 900.0


class Suite:
    """Tests, a copy of the sources with all faults, and what is known of both."""

    def __init__(self, name: str, tests: Path):
        folder = BUILD / name
        self._tests, self._tree = tests, folder / "tree"
        self._reached, self._caught = folder / "reached.jsonl", folder / "caught.json"

    def reached(self) -> dict[str, dict[str, Any]]:
        """Of every test: its outcome, what it costs, and the numbers of the faults that it reaches."""
        rows = map(json.loads, self._reached.open()) if self._reached.exists() else ()
        return {row["test"]: row for row in rows}

    def caught(self) -> dict[str, list[str]]:
        """Of every fault that was tried: the tests that notice it."""
        return json.loads(self._caught.read_text()) if self._caught.exists() else {}

    def prepare(self) -> None:
        """Brings the copy, its environment and its native modules up to date."""
        with tempfile.TemporaryDirectory(dir=BUILD) as name:
            fresh = Path(name)
            _copy_listed(ROOT, fresh, tests=False)
            _copy_listed(self._tests, fresh, tests=True)
            plant(fresh, MUTANTS)
            _update(self._tree, fresh)
        if not ENVIRONMENT.exists():
            # The packages of this environment without its editable jax_tt, whose .pth file is not read from there.
            venv.create(ENVIRONMENT, symlinks=True)
            (packages,) = ENVIRONMENT.glob("lib/python*/site-packages")
            (packages / "packages.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
        native = self._tree.parent / "native"
        configure(native, {"JAX_TT_EMULATION": "ON", "JAX_TT_CUDA": "OFF"}, source=self._tree)
        build(native, "in_tree")
        # Beside the headers that extensions with rules include.
        shutil.copy(self._tree / "ffi" / "planted.h", self._tree / "jax_tt" / "include" / "ffi")

    def reach(self, arguments: list[str]) -> None:
        """Runs all tests without a fault."""
        options = ("--numprocesses=auto", "--dist=worksteal", *arguments)
        known = self.reached() | {row["test"]: row for row in self._run(*options)}
        self._reached.write_text("".join(json.dumps(row) + "\n" for row in known.values()))
        places = {k for row in known.values() for k in row["reached"]}
        for k, mutant in enumerate(MUTANTS):
            if k not in places:
                print(f"no test reaches: {mutant.name} ({mutant.file})")

    def catch(self, chosen: Iterable[int]) -> None:
        """Runs the tests that reach each of some faults, cheapest first, until two have failed."""
        rows, caught = list(self.reached().values()), self.caught()
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = {pool.submit(self._catch, k, _candidates(k, rows)): k for k in chosen}
            ended = concurrent.futures.as_completed(futures)
            for future in tqdm(ended, total=len(futures), unit="fault"):
                mutant = MUTANTS[futures[future]]
                caught[mutant.name] = future.result()
                self._caught.write_text(json.dumps(caught, indent=1) + "\n")
                if not caught[mutant.name]:
                    tqdm.write(f"NOT CAUGHT: {mutant.name} ({mutant.file})")

    def _catch(self, k: int, tests: list[str]) -> list[str]:
        # The cheapest notice most faults, and few of them are collected faster than all.
        failed: list[str] = []
        for begin, end in itertools.pairwise((0, 8, 32, 128, len(tests))):
            if len(failed) < WANTED and tests[begin:end]:
                failed += self._failed(k, tests[begin:end], WANTED - len(failed))
        return failed

    def _failed(self, k: int, tests: list[str], most: int) -> list[str]:
        rows = self._run(f"--maxfail={most}", *tests, active=k)
        failed = [row["test"] for row in rows if row["outcome"] == "failed"]
        if len(failed) < most and len(rows) < len(tests):
            # The process has died, or goes on for ever, in the first test without a result.
            ended = {row["test"] for row in rows}
            failed += [test for test in tests if test not in ended][:1]
        return failed

    def _run(self, *arguments: str, active: int | None = None) -> list[dict[str, Any]]:
        """The results of tests of the copy, in the order in which they ended."""
        python = ENVIRONMENT / "bin" / "python"
        command = [python, "-m", "pytest", "-p", "scripts.mutant_plugin", "--quiet", *arguments]
        with tempfile.TemporaryDirectory() as name:
            environment = os.environ | {
                "JAX_TT_MUTANT_RUN": name,
                "OPENBLAS_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            quiet: dict[str, Any] = {}
            if active is not None:
                environment["JAX_TT_MUTANT"] = str(active)
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                quiet["timeout"] = TIMEOUT_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, cwd=self._tree, env=environment, **quiet)
            results = sorted(Path(name).glob("*.jsonl"))
            return [json.loads(line) for path in results for line in path.open()]


def _copy_listed(source: Path, target: Path, tests: bool) -> None:
    """Copies what git does not ignore: the tests, or all else."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=source, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith("tests/") == tests and (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)


def _update(tree: Path, fresh: Path) -> None:
    """Makes ``tree`` equal to ``fresh``; what is equal keeps its time, so that the rest alone is compiled."""
    new = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for folder in ("ffi", "tests"):
        for path in (tree / folder).rglob("*"):
            if path.is_file() and path.relative_to(tree) not in new:
                path.unlink()
    for name in new:
        if not (tree / name).exists() or (tree / name).read_bytes() != (fresh / name).read_bytes():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(fresh / name, tree / name)


def _candidates(k: int, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Tests that reach a fault, cheapest first."""
    reaching = [row for row in rows if k in row["reached"] and row["outcome"] == "passed"]
    chosen: list[str] = []
    seconds = 0.0
    for row in sorted(reaching, key=lambda row: row["cpu"])[:MOST_TESTS]:
        seconds += row["cpu"]
        if seconds > MOST_SECONDS and len(chosen) >= WANTED:
            break
        chosen.append(row["test"])
    return chosen


def room(mutant: Mutant) -> str:
    parts = mutant.file.split("/")[:-1]
    deep = len(parts) > 2 and parts[1] in ("cpu", "cuda", "_kinds", "_layers")
    return "/".join(parts[: 3 if deep else 2])


def table(caught: Mapping[str, list[str]]) -> str:
    """The faults that were tried, by room, and the tests that notice each of them."""
    tried = [mutant for mutant in MUTANTS if mutant.name in caught]
    faults = Counter(map(room, tried))
    once, twice = (
        Counter(room(mutant) for mutant in tried if len(caught[mutant.name]) >= least)
        for least in (1, WANTED)
    )
    lines = [
        "# Planted faults and the tests that notice them",
        "",
        f"Written by `python -m scripts.mutants table`. Of {len(MUTANTS)} faults {len(tried)} were tried.",
        "",
        "| room | faults | noticed | by two tests |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {faults[name]} | {once[name]} | {twice[name]} |"
            for name in sorted(faults)
        ),
        f"| all | {faults.total()} | {once.total()} | {twice.total()} |",
        "",
        "| fault | file | tests that notice it |",
        "|---|---|---|",
    ]
    for mutant in tried:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in caught[mutant.name])
        lines.append(f"| {mutant.name} | `{mutant.file}` | {tests or '**none**'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("reach", "catch", "table"))
    parser.add_argument(
        "names", nargs="*", help="texts in names of faults; reach: options of pytest"
    )
    parser.add_argument("--share", type=fractions.Fraction, default=1, metavar="1/N")
    parser.add_argument("--tests", type=Path, default=ROOT, metavar="FOLDER")
    parser.add_argument("--suite", default="now", metavar="NAME")
    arguments, options = parser.parse_known_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    suite = Suite(arguments.suite, arguments.tests)
    if arguments.command == "table":
        TABLE.write_text(table(suite.caught()))
        return
    suite.prepare()
    if arguments.command == "reach":
        suite.reach([*arguments.names, *options])
        return
    step, known = round(1 / arguments.share), suite.caught()
    suite.catch(
        k
        for k, mutant in enumerate(MUTANTS)
        if (
            any(name in mutant.name for name in arguments.names)
            if arguments.names
            else k % step == 0
        )
        and (arguments.names or mutant.name not in known)
    )


if __name__ == "__main__":
    main()
