"""The report of a case, and how it is written as JSON and printed."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.timing import Timing


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender on one piece of work."""

    work: str
    contender: str
    median_ms: float
    lower_ms: float
    upper_ms: float
    fastest_ms: float
    calls: int


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number computed from the rows or measured in addition to them, optionally with a bound."""

    name: str
    value: float
    unit: str
    meaning: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the bound holds; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None

    @property
    def bound(self) -> str:
        """The bound as text, empty without one."""
        if self.at_least is not None:
            return f">= {number(self.at_least)}"
        return f"<= {number(self.at_most)}" if self.at_most is not None else ""


@dataclasses.dataclass
class Report:
    """The results of one case. Cases fill it through `timings`, `figure` and `note`."""

    title: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    figures: list[Figure] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    # Told of each row, figure and note when it is there, before the case has ended.
    listener: Callable[[str, Any], None] | None = None

    def _add(self, kind: str, value: Any) -> None:
        getattr(self, kind).append(value)
        if self.listener is not None:
            self.listener(kind, value if isinstance(value, str) else dataclasses.asdict(value))

    def timings(self, timings: Mapping[tuple[str, str], Timing]) -> None:
        """Adds a row for each (work, contender)."""
        for (work, contender), t in timings.items():
            ms = (1e3 * t.median, 1e3 * t.lower, 1e3 * t.upper, 1e3 * t.fastest)
            self._add("rows", Row(work, contender, *ms, t.calls))

    def figure(
        self, name: str, value: float, unit: str, meaning: str, **bound: float | None
    ) -> None:
        """Adds a figure; ``bound`` is ``at_least=`` or ``at_most=``."""
        self._add("figures", Figure(name, float(value), unit, meaning, **bound))

    def note(self, text: str) -> None:
        """Adds a note for readers of the figures, for example that a contender was left out."""
        self._add("notes", text)

    def to_json(self) -> dict[str, Any]:
        parts = {
            kind: [dataclasses.asdict(each) for each in getattr(self, kind)]
            for kind in ("rows", "figures")
        }
        return {"title": self.title, **parts, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Report":
        return cls(
            data["title"],
            [Row(**row) for row in data["rows"]],
            [Figure(**figure) for figure in data["figures"]],
            list(data["notes"]),
        )

    def __str__(self) -> str:
        parts = [self.title, "-" * len(self.title)]
        if self.rows:
            parts.append(aligned(ROW_HEADER, [row_cells(row) for row in self.rows]))
        if self.figures:
            parts.append(aligned(FIGURE_HEADER, [figure_cells(figure) for figure in self.figures]))
        parts += [f"note: {note}" for note in self.notes]
        return "\n".join(parts)


ROW_HEADER = ("work", "contender", "median ms", "quartiles ms", "calls")
FIGURE_HEADER = ("figure", "value", "bound", "reached")


def row_cells(row: Row) -> tuple[str, ...]:
    """A row as it is printed and as it stands in the docs."""
    spread = f"{number(row.lower_ms)} - {number(row.upper_ms)}"
    return (row.work, row.contender, number(row.median_ms), spread, str(row.calls))


def figure_cells(figure: Figure) -> tuple[str, ...]:
    """A figure as it is printed and as it stands in the docs."""
    reached = {True: "yes", False: "no", None: ""}[figure.reached]
    return (figure.meaning, f"{number(figure.value)} {figure.unit}".strip(), figure.bound, reached)


def number(value: float) -> str:
    """Three significant digits without an exponent: 0.0123, 4.56, 789, 12,300."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    digits = f"{value:.3g}"
    return f"{value:.10f}".rstrip("0").rstrip(".") if "e" in digits else digits


def aligned(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A plain-text table: first two columns to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    left = 2 if len(header) > 4 else 1
    lines = []
    for cells in (header, *rows):
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def load(path: Path) -> dict[str, Any]:
    """A results file, or an empty one where there is none yet."""
    return json.loads(path.read_text()) if path.exists() else {"cases": {}}


def save(path: Path, data: dict[str, Any]) -> None:
    """Writes a results file, which is either complete or not written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)
