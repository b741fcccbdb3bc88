"""Fills the tables and figures of README and docs from results files.

A text holds markers, which Markdown does not show:

    <!-- bench:table cpu-intel-xeon-2c headline rows -->        a case's timings; `figures` for its figures
    ...replaced...
    <!-- bench:end -->

    <!-- bench:figure cpu-intel-xeon-2c headline.speedup_uniform -->31 x<!-- bench:end -->
    <!-- bench:machine cpu-intel-xeon-2c -->...<!-- bench:end -->

    python -m benchmarks.render            # writes
    python -m benchmarks.render --check    # fails if a text differs from its results file
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.machine import ROOT
from benchmarks.results import Report

RESULTS = ROOT / "benchmarks" / "results"
_BLOCK = re.compile(
    r"(?P<open><!-- bench:(?P<kind>table|figure|machine) (?P<arguments>[^>]*?) -->)"
    r"(?P<body>.*?)(?P<close><!-- bench:end -->)",
    re.DOTALL,
)
_CODE = re.compile(r"```.*?```", re.DOTALL)
# A measured time, rate or speedup: what must never be typed by hand.
_CLAIM = re.compile(
    r"\d[\d.,]*\s*(?:ms|µs|us|GFLOP/s|x faster|× faster|times faster|x slower|times slower)\b"
)


NOT_MEASURED = "(not measured yet)"


class NotMeasured(Exception):
    """The results file, or the case in it, does not exist yet."""


def documents() -> list[Path]:
    """The texts that may quote results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(text: str, folder: Path = RESULTS) -> str:
    """``text`` with every marked block filled from the results files in ``folder``."""

    def fill(match: re.Match[str]) -> str:
        name, *arguments = match["arguments"].split()
        data = results.load(folder / f"{name}.json")
        try:
            body = _KINDS[match["kind"]](data, *arguments)
        except NotMeasured:
            body = NOT_MEASURED
        return match["open"] + body + match["close"]

    return _BLOCK.sub(fill, text)


def unsourced(text: str) -> list[str]:
    """Times, rates and speedups in ``text`` that stand outside marked blocks and code."""
    plain = _CODE.sub("", _BLOCK.sub("", text))
    return [match[0] for match in _CLAIM.finditer(plain)]


def named_cases(text: str) -> set[str]:
    """The cases whose tables or figures ``text`` quotes."""
    blocks = [match for match in _BLOCK.finditer(text) if match["kind"] != "machine"]
    return {match["arguments"].split()[1].partition(".")[0] for match in blocks}


def _table(data: dict[str, Any], case: str, part: str) -> str:
    report = Report.from_json(_measured(data, case))
    if part == "rows":
        header, cells = results.ROW_HEADER, [results.row_cells(row) for row in report.rows]
    elif part == "figures":
        header = results.FIGURE_HEADER
        cells = [results.figure_cells(figure) for figure in report.figures]
    else:
        raise ValueError(f"{case} {part}: expected `rows` or `figures`")
    lines = [header, ("---",) * len(header), *cells]
    # Blank lines, so that no Markdown dialect takes the markers for part of the table.
    return "\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def _figure(data: dict[str, Any], path: str) -> str:
    case, _, name = path.partition(".")
    report = Report.from_json(_measured(data, case))
    for figure in report.figures:
        if figure.name.replace(" ", "_") == name:
            return f"{results.number(figure.value)} {figure.unit}".strip()
    for row in report.rows:
        if f"{row.work}/{row.contender}".replace(" ", "_") == name:
            return f"{results.number(row.median_ms)} ms"
    raise ValueError(f"{path}: the case {case!r} has no such figure, nor a row work/contender")


def _machine(data: dict[str, Any]) -> str:
    if "machine" not in data:
        raise NotMeasured
    found = data["machine"]
    jax = found["versions"]["jax"]
    return f"{machine.title(found)}, jax {jax}"


_KINDS: dict[str, Callable[..., str]] = {"table": _table, "figure": _figure, "machine": _machine}


def _measured(data: dict[str, Any], case: str) -> dict[str, Any]:
    measured = data["cases"].get(case)
    if measured is None:
        raise NotMeasured
    if measured["quick"]:
        raise ValueError(f"case {case!r} is of a quick run, whose figures mean nothing")
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, report differences")
    check = parser.parse_args().check
    wrong = False
    for path in filter(Path.exists, documents()):
        text = path.read_text()
        filled = render(text)
        for claim in unsourced(text):
            wrong = True
            print(f"{path.relative_to(ROOT)}: {claim!r} stands outside a bench marker")
        if filled != text and check:
            wrong = True
            print(f"{path.relative_to(ROOT)}: differs from its results; run benchmarks.render")
        elif filled != text:
            path.write_text(filled)
            print(f"{path.relative_to(ROOT)}: filled")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
