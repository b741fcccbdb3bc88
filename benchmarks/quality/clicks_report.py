"""The table and the picture of the points that `clicks` measures."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.curve_report import WIDTH

LABELS = {
    "dense": "dense",
    "compress": "jax_tt.compress, from dense",
    "int8": "8 bits a number, from scratch",
    "cache": "tensor train with a row cache, from scratch",
}
COLOURS = {"dense": "#2171b5", "compress": "#d94801", "int8": "#238b45", "cache": "#6a51a3"}

Points = Sequence[dict[str, Any]]


def table(points: Points) -> str:
    """Markdown: a line per size; AUC as the mean over the seeds, and its difference from dense tables."""
    lines = [
        "| tables | bytes | smaller | AUC | over dense tables | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for way, ratio in _sizes(points):
        own = [one for one in points if (one["way"], one["ratio"]) == (way, ratio)]
        nbytes = statistics.fmean(one["bytes"] for one in own)
        smaller = statistics.fmean(_smaller(points, one) for one in own)
        auc = statistics.fmean(one["auc"] for one in own)
        more = statistics.fmean(one["auc"] - _dense(points, one)["auc"] for one in own)
        cells = [LABELS[way], f"{nbytes:,.0f}", f"{smaller:.1f}x", f"{auc:.4f}", f"{more:+.4f}"]
        lines.append(f"| {' | '.join(cells)} | {len(own)} |")
    return "\n".join(lines)


def picture(path: Path, points: Points) -> None:
    """A PNG: AUC over how much smaller the tables are, one line per way."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    for way, label in LABELS.items():
        sizes = [size for size in _sizes(points) if size[0] == way]
        groups = [[one for one in points if (one["way"], one["ratio"]) == size] for size in sizes]
        smaller = [statistics.fmean(_smaller(points, one) for one in own) for own in groups]
        aucs = [statistics.fmean(one["auc"] for one in own) for own in groups]
        axis.plot(smaller, aucs, "o-", color=COLOURS[way], label=label)
        if way == "dense" and aucs:
            axis.axhline(aucs[0], color=COLOURS[way], linewidth=0.8, zorder=0)
    axis.set(xscale="log", xlabel="tables smaller by", ylabel="AUC on held-out clicks")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _sizes(points: Points) -> list[tuple[str, float]]:
    """Ways and ratios, in the order of `LABELS`."""
    return sorted({(one["way"], one["ratio"]) for one in points}, key=_place)


def _place(size: tuple[str, float]) -> tuple[int, float]:
    return list(LABELS).index(size[0]), size[1]


def _dense(points: Points, point: dict[str, Any]) -> dict[str, Any]:
    (found,) = [one for one in points if (one["way"], one["seed"]) == ("dense", point["seed"])]
    return found


def _smaller(points: Points, point: dict[str, Any]) -> float:
    return _dense(points, point)["bytes"] / point["bytes"]
