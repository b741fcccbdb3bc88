"""What the tests cost, by folder, and those that take more than 20 CPU seconds without a mark that says why.

python -m scripts.test_costs build/test_costs.jsonl     a file that `make test-ci` wrote; exits with 1 if there are such
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

MOST_SECONDS = 20.0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def room(test: str) -> str:
    """The folder of a test, or its file at the top of `tests`."""
    return test.partition("::")[0].rpartition("/")[0].removeprefix("tests").lstrip("/") or "(top)"


def by_room(rows: list[dict[str, Any]]) -> list[str]:
    rooms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        rooms[room(row["test"])].append(row)
    rooms["all"] = rows
    lines = ["| tests | cases | CPU s | programs | compiled |", "|---|---|---|---|---|"]
    for name, inside in sorted(rooms.items(), key=lambda item: -sum(r["cpu"] for r in item[1])):
        sums = [sum(row[column] for row in inside) for column in ("cpu", "programs", "compiled")]
        cells = [name, str(len(inside)), *(f"{number:.0f}" for number in sums)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def unexplained(rows: list[dict[str, Any]]) -> list[str]:
    """Tests that take long without the mark `dear`."""
    return [r["test"] for r in rows if r["cpu"] > MOST_SECONDS and not r["dear"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    rows = read(parser.parse_args().file)
    print(*by_room(rows), sep="\n")
    found = unexplained(rows)
    for test in found:
        print(f"more than {MOST_SECONDS:.0f} CPU s without @pytest.mark.dear(reason): {test}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
