"""Draws images/results-light.svg and images/results-dark.svg, the picture of README, from benchmarks/results.

    python -m docs.make_results_picture

Above: the recall that is left over how much smaller both tables are, orders of ids counted. Below: the time of a
training step. It is narrow, so that its text can be read on a phone. The background is transparent; the two files
differ in the colours of their text.
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
from benchmarks.quality import curve_report, frontier_report
from benchmarks.render import RESULTS
from benchmarks.results import Report, number

IMAGES = Path(__file__).parent / "images"
MACHINE = "cpu-amd-epyc-2c"
DATA_SET = "amazon_book"
OURS, TRAIN, OTHERS, DENSE, CODES = "#e8590c", "#a0522d", "#868e96", "#1c7ed6", "#2f9e44"
INKS = {"light": "#1f2328", "dark": "#e6edf3"}
# Tables made of trained ones, and tensor trains that were trained on from a spectral start: labels and colours.
MADE = {
    "auto": ("jax_tt.compress", OURS),
    "faiss_product": ("product codes of faiss", CODES),
    "rounding": ("3 bits a number", DENSE),
    "low_rank": ("low rank", OTHERS),
    "hashing": ("hashing", "#ced4da"),
}
TRAINED = {
    "tt_residual_spectral": ("sum of tensor trains, trained", OURS),
    "tt2_spectral": ("one tensor train, trained", TRAIN),
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
    style: dict[Any, Any] = {**colours, "font.size": 10, "svg.hashsalt": "jax_tt"}
    with plt.rc_context(style):
        figure, axes = plt.subplot_mosaic(
            [["recall"], ["dense"], ["tt"]],
            figsize=(curve_report.WIDTH, 7.4),
            layout="constrained",
            height_ratios=(6, 3.4, 2.2),
        )
        draw_recall(axes["recall"], points("frontier"), points("curve"))
        data = json.loads((RESULTS / f"{MACHINE}.json").read_text())
        for name, (heading, bars) in zip(("dense", "tt"), STEPS.items(), strict=True):
            draw_bars(axes[name], heading, measured(data, bars))
        axes["tt"].set_xlabel(
            f"11,000,000 x 64, 512 bags of 20 ids\n{machine.title(data['machine'])}"
        )
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def points(name: str) -> list[dict[str, Any]]:
    """What a program of benchmarks/quality has measured."""
    path = RESULTS / "quality" / f"{name}_results.json"
    return list(json.loads(path.read_text())["points"].values())


def draw_recall(
    axis: Axes, made: Sequence[dict[str, Any]], trained: Sequence[dict[str, Any]]
) -> None:
    """Shares of the recall of the dense tables of the same program."""
    for method, (label, colour) in MADE.items():
        sizes, shares, _ = zip(*frontier_report.line(made, DATA_SET, method), strict=True)
        axis.plot(sizes, shares, "o-", color=colour, markersize=4, label=label)
    means = [one for one in curve_report.means(trained) if one.data_set == DATA_SET]
    (dense,) = (one for one in means if one.method == "dense")
    for method, (label, colour) in TRAINED.items():
        line = [one for one in means if one.method == method]
        sizes = [dense.bytes / (one.bytes + one.order_bytes) for one in line]
        shares = [one.recall / dense.recall for one in line]
        axis.plot(sizes, shares, "o--", color=colour, markersize=4, label=label)
    axis.axhline(1, color=DENSE, linewidth=0.8, linestyle=":", zorder=0)
    axis.set_xscale("log")
    axis.set_xticks([8, 15, 30, 50, 100], ["8x", "15x", "30x", "50x", "100x"])
    axis.minorticks_off()
    axis.set_ylim(0, 1.05)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_xlabel("smaller than dense tables by")
    axis.set_title("Recall@20 on Amazon-book, share of dense tables", fontsize=10.5, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper center", bbox_to_anchor=(0.35, -0.2), ncols=2, frameon=False)


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
    axis.set_title(f"{heading} (log scale)", fontsize=10.5, loc="left")


if __name__ == "__main__":
    main()
