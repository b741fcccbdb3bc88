"""The tables and the picture of the points that `frontier` measures."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.curve_report import WIDTH

LABELS = {
    "auto": "jax_tt.compress",
    "faiss_product": "product codes of faiss",
    "faiss_residual": "residual codes of faiss",
    "rounding": "numbers of 2, 3, 4 or 8 bits",
    "low_rank": "low rank",
    "hashing": "hashing",
    "quotient_remainder": "quotient-remainder",
}
# What tables are trained with, where there is no dense one.
SCRATCH = {
    "int8": "8 bits a number",
    "int4": "4 bits a number",
    "least_squares": "4 bits a number, by least squares",
}
# Colours that stay apart for colour-blind readers.
COLOURS = ("#d94801", "#2171b5", "#6baed6", "#dd1c77", "#41ab5d", "#737373", "#6a51a3")

Points = Sequence[dict[str, Any]]


def table(points: Points) -> str:
    """Markdown: a line per method, a column per size; recall as a share of that of the dense tables.

    Only points of tables that are made from dense ones; `scratch` has the others.
    """
    points = [one for one in points if _trained(one) == "dense" and one["method"] in LABELS]
    ratios = sorted({point["ratio"] for point in points})
    lines = [
        f"| data | tables | {' | '.join(f'{ratio:g}x' for ratio in ratios)} |",
        "|---|---|" + "---|" * len(ratios),
    ]
    for name in sorted({point["data_set"] for point in points}):
        for method, label in LABELS.items():
            own = [one for one in points if (one["data_set"], one["method"]) == (name, method)]
            if own:
                cells = [_cell([one for one in own if one["ratio"] == ratio]) for ratio in ratios]
                lines.append(f"| {name} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scratch(points: Points) -> str:
    """Markdown: tables trained with few bits, and what was made of them, as shares of the dense recall.

    A column per size is for what `compress` made of them, a line for what rounding to fewer bits did.
    """
    points = [one for one in points if _trained(one) != "dense"]
    ratios = sorted({one["ratio"] for one in points if one["method"] == "auto"})
    lines = [
        f"| data | trained with | smaller by | of dense | {' | '.join(f'{ratio:g}x' for ratio in ratios)} |",
        "|---|---|---|---|" + "---|" * len(ratios),
    ]
    for name in sorted({one["data_set"] for one in points}):
        for kind, label in SCRATCH.items():
            own = [one for one in points if (one["data_set"], _trained(one)) == (name, kind)]
            made = [
                _cell([one for one in own if (one["method"], one["ratio"]) == ("auto", ratio)])
                for ratio in ratios
            ]
            for method, cells in (("trained", made), ("rounding", [""] * len(ratios))):
                if runs := [one for one in own if one["method"] == method]:
                    then = f", rounded to {runs[0]['users']}" if method == "rounding" else ""
                    size = f"{_mean(runs)[0]:.1f}"
                    line = [name, f"{label}{then}", size, _cell(runs), *cells]
                    lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


def chosen(points: Points) -> str:
    """Markdown: what `compress` chose with the first seed, and how it fared."""
    lines = [
        "| data | size | smaller by | users | items | of dense, before finetuning | of dense |",
        "|---|---|---|---|---|---|---|",
    ]
    own = [
        one for one in points if (one["method"], one["seed"], _trained(one)) == ("auto", 0, "dense")
    ]
    for one in sorted(own, key=lambda one: (one["data_set"], one["ratio"])):
        before, after = (one[what] / one["dense_recall"] for what in ("recall_before", "recall"))
        smaller = one["dense_bytes"] / one["bytes"]
        lines.append(
            f"| {one['data_set']} | {one['ratio']:g}x | {smaller:.1f} | {one['users']} | {one['items']} "
            f"| {before:.1%} | {after:.1%} |"
        )
    return "\n".join(lines)


def picture(path: Path, points: Points) -> None:
    """A PNG: one panel per data set, one line per method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = [one for one in points if _trained(one) == "dense"]
    names = sorted({point["data_set"] for point in points})
    figure, axes = plt.subplots(
        len(names), 1, figsize=(WIDTH, 3.4 * len(names) + 1), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=True):
        for (method, label), colour in zip(LABELS.items(), COLOURS, strict=True):
            if found := line(points, name, method):
                smaller, shares, spreads = zip(*found, strict=True)
                axis.errorbar(smaller, shares, spreads, color=colour, marker="o", capsize=3, label=label)  # fmt: skip
        axis.axhline(1.0, color="k", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", xlabel="smaller by", ylabel="recall@20, share of dense", title=name)
        ratios = sorted({one["ratio"] for one in points})
        axis.set_xticks(ratios, [f"{ratio:g}x" for ratio in ratios])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def line(points: Points, data_set: str, method: str) -> list[tuple[float, float, float]]:
    """For each size of the tables that a method makes of dense ones: what `_mean` gives."""
    own = [
        one
        for one in points
        if (one["data_set"], one["method"], _trained(one)) == (data_set, method, "dense")
    ]
    ratios = sorted({one["ratio"] for one in own})
    return [_mean([one for one in own if one["ratio"] == ratio]) for ratio in ratios]


def trained(points: Points, data_set: str, kind: str) -> tuple[float, float, float]:
    """What `_mean` gives for the tables that were trained as one of `SCRATCH`, as they are."""
    own = (data_set, "trained", kind)
    return _mean([one for one in points if (one["data_set"], one["method"], _trained(one)) == own])


def _trained(point: dict[str, Any]) -> str:
    """What the tables that it is made from were trained as: ``"dense"``, or one of `SCRATCH`."""
    return point.get("trained", "dense")


def _cell(runs: Points) -> str:
    if not runs:
        return ""
    _, share, spread = _mean(runs)
    return f"{share:.1%}" + (f" ± {100 * spread:.1f}" if len(runs) > 1 else "")


def _mean(runs: Points) -> tuple[float, float, float]:
    """How many times smaller; mean and deviation of the share of the dense recall, over the seeds."""
    shares = [one["recall"] / one["dense_recall"] for one in runs]
    smaller = statistics.fmean(one["dense_bytes"] / one["bytes"] for one in runs)
    spread = statistics.stdev(shares) if len(runs) > 1 else 0.0
    return smaller, statistics.fmean(shares), spread
