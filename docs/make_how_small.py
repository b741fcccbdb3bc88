"""Fills the table of how_small.md and draws images/how_small.png from examples/retrieval/curve_results.json.

    python -m docs.make_how_small

The results file is the one that `python -m examples.retrieval.curve` writes into its output folder.
"""

import json
import re
from pathlib import Path
from typing import Any

from examples.retrieval import curve_report

PAGE = Path(__file__).parent / "how_small.md"
PICTURE = Path(__file__).parent / "images" / "how_small.png"
RESULTS = Path(__file__).parents[1] / "examples" / "retrieval" / "curve_results.json"
_BLOCK = re.compile(r"(?<=<!-- curve:begin -->\n).*?(?=<!-- curve:end -->)", re.DOTALL)


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text()))
    if rows := points():
        curve_report.picture(PICTURE, rows)


def points() -> list[dict[str, Any]]:
    """The runs of the results file, none if there is no file."""
    return list(json.loads(RESULTS.read_text())["points"].values()) if RESULTS.exists() else []


def fill(page: str) -> str:
    """The page with the table between its markers."""
    rows = points()
    body = curve_report.table(rows) if rows else "Nothing has been trained yet."
    return _BLOCK.sub(lambda _: f"\n{body}\n\n", page)


if __name__ == "__main__":
    main()
