"""Fills the tables of how_small_measurements.md and draws its pictures from the results of benchmarks/quality.

    python -m docs.make_how_small

They lie in benchmarks/results/quality: `curve_results.json` as `python -m benchmarks.quality.curve` leaves it in its
output folder, and `frontier_results.json`, `learning_results.json` and `clicks_results.json`, which modules of these
names write there.
"""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.quality import (
    clicks,
    clicks_report,
    curve_report,
    frontier,
    frontier_report,
    learning,
)

DOCS = Path(__file__).parent
PAGE = DOCS / "how_small_measurements.md"
RESULTS = learning.RESULTS.parent / "curve_results.json"
_BLOCK = re.compile(
    r"(<!-- (?P<name>curve|frontier|scratch|clicks|chosen|learning):begin -->\n).*?(<!-- (?P=name):end -->)",
    re.DOTALL,
)


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text()))
    if rows := read(RESULTS, "points"):
        curve_report.picture(DOCS / "images" / "how_small.png", rows)
    if rows := read(frontier.RESULTS, "points"):
        frontier_report.picture(DOCS / "images" / "frontier.png", rows)
    if rows := read(clicks.RESULTS, "points"):
        clicks_report.picture(DOCS / "images" / "clicks.png", rows)
    if rows := read(learning.RESULTS, "runs"):
        learning.picture(DOCS / "images" / "learning.png", rows)


def read(path: Path, what: str) -> list[dict[str, Any]]:
    """The runs of a results file, none if there is no file."""
    return list(json.loads(path.read_text())[what].values()) if path.exists() else []


def fill(page: str) -> str:
    """The page with the tables between their markers."""
    tables = {
        "curve": (read(RESULTS, "points"), curve_report.table),
        "frontier": (read(frontier.RESULTS, "points"), frontier_report.table),
        "scratch": (read(frontier.RESULTS, "points"), frontier_report.scratch),
        "chosen": (read(frontier.RESULTS, "points"), frontier_report.chosen),
        "clicks": (read(clicks.RESULTS, "points"), clicks_report.table),
        "learning": (read(learning.RESULTS, "runs"), learning.table),
    }

    def body(found: re.Match[str]) -> str:
        rows, table = tables[found["name"]]
        text = table(rows) if rows else "Nothing has been trained yet."
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return _BLOCK.sub(body, page)


if __name__ == "__main__":
    main()
