"""Draws images/results-light.svg and images/results-dark.svg, the picture of README, from benchmarks/results.

    python -m docs.make_results_picture

Left: recall over the bytes of both tables, orders of ids counted. Right: the time of a training step. The background is
transparent; the two files differ in the colours of their text.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks import machine
from benchmarks.quality import curve_report
from benchmarks.render import RESULTS
from benchmarks.results import Report, number

IMAGES = Path(__file__).parent / "images"
MACHINE = "cpu-amd-epyc-2c"
DATA_SET = "amazon_book"
OURS, OTHERS, DENSE = "#e8590c", "#868e96", "#1c7ed6"
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
# Of each kind of table the better start, with the place of its label: point of the line, shift in points.
LINES = {
    "dense": ("dense", DENSE, 0, (-4, 6)),
    "tt_residual_spectral": ("sum of tensor trains", OURS, 0, (8, -7)),
    "tt2_spectral": ("one tensor train", OURS, 0, (8, -4)),
    "low_rank_spectral": ("low rank", OTHERS, 1, (8, -4)),
    "quotient_remainder": ("quotient-remainder, hashing", OTHERS, 0, (8, 2)),
    "hashing": ("", OTHERS, 0, (0, 0)),  # on the line before
}
# Case, then (work, contender as measured, label): the rows of the table in README; jax_tt last.
STEPS = {
    "Dense table, step with SGD": [
        ("dense_step", "uniform, second table", "nnx.Embed + optax.sgd step", "nnx.Embed + optax"),
        ("dense_step", "uniform", "fbgemm TBE step", "FBGEMM TBE"),
        ("dense_step", "uniform", "torch EmbeddingBag + SGD step", "torch EmbeddingBag"),
        ("dense_by_hand", "SGD, uniform", "plain JAX step by hand", "plain JAX by hand"),
        ("dense_by_hand", "SGD, uniform", "jax_tt fused step", "jax_tt"),
    ],
    "Tensor train of rank 32, step with SGD": [
        ("headline", "uniform", "tltorch step", "tensorly-torch"),
        ("headline", "uniform", "XLA gather + einsum step", "plain JAX by hand"),
        ("headline", "uniform", "jax_tt fused step", "jax_tt"),
    ],
}


def main() -> None:
    for theme, ink in INKS.items():
        draw(IMAGES / f"results-{theme}.svg", ink)


def draw(path: Path, ink: str) -> None:
    """One picture, its text and axes in the colour ``ink``."""
    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
    )
    # A fixed salt and no date: the same results give the same file.
    style: dict[Any, Any] = {**colours, "font.size": 8.5, "svg.hashsalt": "jax_tt"}
    with plt.rc_context(style):
        figure, axes = plt.subplot_mosaic(
            [["recall", "dense"], ["recall", "tt"]],
            figsize=(9.6, 2.75),
            layout="constrained",
            height_ratios=(4.6, 3.4),
            width_ratios=(1, 0.9),
        )
        rows = json.loads((RESULTS / "quality" / "curve_results.json").read_text())["points"]
        draw_recall(axes["recall"], list(rows.values()))
        data = json.loads((RESULTS / f"{MACHINE}.json").read_text())
        for name, (heading, bars) in zip(("dense", "tt"), STEPS.items(), strict=True):
            draw_bars(axes[name], heading, measured(data, bars))
        axes["tt"].set_xlabel(
            f"11,000,000 x 64, 512 bags of 20 ids; {machine.title(data['machine'])}"
        )
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def draw_recall(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    points = [point for point in curve_report.means(rows) if point.data_set == DATA_SET]
    for method, (label, colour, at, shift) in LINES.items():
        line = [point for point in points if point.method == method]
        sizes = [(point.bytes + point.order_bytes) / 1e6 for point in line]
        recalls = [point.recall for point in line]
        axis.plot(sizes, recalls, color=colour, marker="o", markersize=4)
        axis.annotate(
            label, (sizes[at], recalls[at]), shift, textcoords="offset points", color=colour,
            ha="left" if shift[0] > 0 else "right", weight="bold" if colour == OURS else "normal",
        )  # fmt: skip
        if method == "dense":
            axis.axhline(recalls[0], color=colour, linewidth=0.8, linestyle=":", zorder=0)
    axis.set_xscale("log")
    axis.set_xticks([0.3, 1, 3, 10, 25], ["0.3", "1", "3", "10", "25"])
    axis.minorticks_off()
    axis.set_ylim(0, 0.17)
    axis.set_xlim(left=0.25)
    axis.set_xlabel("MB of the user and the item table, orders of ids included")
    axis.set_title("Recall@20 on Amazon-book, by size of the tables", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def measured(data: dict[str, Any], bars: Sequence[tuple[str, ...]]) -> list[tuple[str, float]]:
    """Labels and medians in milliseconds of the bars whose case was measured on that machine."""
    found = []
    for case, work, contender, label in bars:
        if case in data["cases"]:
            report = Report.from_json(data["cases"][case])
            (row,) = (r for r in report.rows if (r.work, r.contender) == (work, contender))
            found.append((label, row.median_ms))
    return found


def draw_bars(axis: Axes, heading: str, bars: Sequence[tuple[str, float]]) -> None:
    labels, times = zip(*bars, strict=True)
    colours = [OURS if label == "jax_tt" else OTHERS for label in labels]
    drawn = axis.barh(labels, times, color=colours, height=0.7)
    axis.bar_label(drawn, [f"{number(time)} ms" for time in times], padding=3)
    axis.set_xscale("log")
    axis.set_xlim(1, 8000)
    axis.invert_yaxis()
    axis.tick_params(length=0)
    axis.set_xticks([])
    axis.minorticks_off()
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.set_title(f"{heading} (log scale)", fontsize=9, loc="left")


if __name__ == "__main__":
    main()
