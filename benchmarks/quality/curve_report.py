"""The table and the picture of recall over bytes, from the results of single runs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

# Inches of a picture: on a phone of 360 pixels, its text of 10 points has the size of small print.
WIDTH = 5.4

LABELS = {
    "dense": "dense",
    "dense_spectral": "dense, spectral start",
    "int8": "8 bits a number",
    "int4": "4 bits a number",
    "tt_residual": "sum of TTs from dense",
    "tt_residual_spectral": "sum of TTs from dense, spectral start",
    "tt_residual_scratch": "sum of TTs, spectral start",
    "tt2_spectral": "TT of two cores, ordered, spectral start",
    "tt2_order": "TT of two cores, ordered",
    "tt_order": "TT, ids ordered by interactions",
    "tt": "TT, original order of ids",
    "low_rank": "low rank",
    "low_rank_spectral": "low rank, spectral start",
    "low_rank_trained": "low rank from dense",
    "low_rank_trained_spectral": "low rank from dense, spectral start",
    "quotient_remainder": "quotient-remainder",
    "hashing": "hashing",
}
# Colours that stay apart for colour-blind readers, and markers.
STYLES = {
    "dense": ("#2171b5", "D"),
    "dense_spectral": ("#9ecae1", "D"),
    "int8": ("#084594", "D"),
    "int4": ("#6baed6", "D"),
    "tt_residual": ("#dd1c77", "*"),
    "tt_residual_spectral": ("#dd1c77", "h"),
    "tt_residual_scratch": ("#dd1c77", "p"),
    "tt2_spectral": ("#8c2d04", "P"),
    "tt2_order": ("#8c2d04", "."),
    "tt_order": ("#d94801", "o"),
    "tt": ("#fdae6b", "s"),
    "low_rank": ("#41ab5d", "^"),
    "low_rank_spectral": ("#41ab5d", "<"),
    "low_rank_trained": ("#41ab5d", ">"),
    "low_rank_trained_spectral": ("#41ab5d", "1"),
    "quotient_remainder": ("#6a51a3", "v"),
    "hashing": ("#737373", "x"),
}


@dataclass(frozen=True)
class Mean:
    """The runs of one point that differ only in the seed.

    Attributes:
        data_set, method, ratio: the point; no ratio for tables with a row for each id.
        recall: mean over the seeds.
        spread: standard deviation over the seeds; None for a single one.
        seeds: their number.
        dtype: storage type of the tables.
        bytes: of the tables, without orders of ids.
        order_bytes: of the orders of ids.
    """

    data_set: str
    method: str
    ratio: float | None
    recall: float
    spread: float | None
    seeds: int
    dtype: str
    bytes: int
    order_bytes: int

    @property
    def label(self) -> str:
        """The name of the method, with the size of a number if it is less than four bytes."""
        return LABELS[self.method] + (", 16 bits" if self.dtype == "bfloat16" else "")


def means(rows: Sequence[dict[str, Any]]) -> list[Mean]:
    """Points in the order of data sets, of `LABELS`, and of falling bytes; rows of tuning are left out."""

    def point(row: dict[str, Any]) -> tuple[str, int, float]:
        return row["data_set"], list(LABELS).index(row["method"]), row["config"]["ratio"] or 0.0

    found = []
    for _, group in groupby(sorted((r for r in rows if not r["tuning"]), key=point), key=point):
        runs = list(group)
        recalls = [run["recall"] for run in runs]
        first = runs[0]
        found.append(
            Mean(
                first["data_set"],
                first["method"],
                first["config"]["ratio"],
                statistics.fmean(recalls),
                statistics.stdev(recalls) if len(runs) > 1 else None,
                len(runs),
                first["config"].get("dtype", "float32"),
                first["bytes"] - first["order_bytes"],
                first["order_bytes"],
            )
        )
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line per point, recall as mean ± standard deviation over the seeds."""
    points = means(rows)
    dense = {point.data_set: point for point in points if point.method == "dense"}
    lines = [
        "| data | tables | recall@20 | of dense | seeds | bytes | smaller by | with the order |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        base = dense.get(point.data_set)
        spread = "" if point.spread is None else f" ± {point.spread:.4f}"
        total = point.bytes + point.order_bytes
        cells = [
            point.data_set,
            point.label,
            f"{point.recall:.4f}{spread}",
            f"{point.recall / base.recall:.0%}" if base and base.recall else "",
            str(point.seeds),
            f"{point.bytes:,}",
            f"{base.bytes / point.bytes:.1f}" if base else "",
            f"{base.bytes / total:.1f}" if base and point.order_bytes else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The same as a PNG: one panel per data set, one line per method; dashed lines include the order of the ids."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = means(rows)
    names = list(dict.fromkeys(point.data_set for point in points))
    figure, axes = plt.subplots(
        len(names), 1, figsize=(WIDTH, 3.6 * len(names) + 4), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=True):
        for method in LABELS:
            line = [p for p in points if p.data_set == name and p.method == method]
            if not line:
                continue
            label = line[0].label
            _line(axis, line, lambda p: p.bytes, label=label, linestyle="-")
            if any(p.order_bytes for p in line):
                with_order = label + ", order counted"
                _line(axis, line, lambda p: p.bytes + p.order_bytes, with_order, "--")
            if method == "dense":  # the line to stay near
                axis.axhline(line[0].recall, color=STYLES[method][0], linewidth=0.8, zorder=0)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        axis.set_xlabel("bytes of both tables")
        axis.set_ylabel("recall@20")
        axis.set_title(name)
    lines: dict[str, Any] = {}
    for axis in axes.flat:
        lines |= {
            label: line for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
    figure.legend(lines.values(), lines, loc="outside lower left", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _line(
    axis: Any, points: Sequence[Mean], size: Callable[[Mean], int], label: str, linestyle: str
) -> None:
    colour, marker = STYLES[points[0].method]
    axis.errorbar(
        [size(p) for p in points],
        [p.recall for p in points],
        yerr=[float("nan") if p.spread is None else p.spread for p in points],
        color=colour,
        marker=marker,
        fillstyle="full" if linestyle == "-" else "none",
        linestyle=linestyle,
        capsize=3,
        label=label,
    )
