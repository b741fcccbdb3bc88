"""Draws images/choice-light.svg and images/choice-dark.svg, the picture of five_minutes.md.

    python -m docs.make_choice_picture

Above: the recall that is left over how much smaller both tables are, from benchmarks/results/quality; orders of ids are
counted. Below: the bytes of a table of 1,000,000 rows of 64 columns, as the descriptions of the tables give them.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import jax_tt
from benchmarks.quality import curve_report, frontier_report
from docs.make_results_picture import (
    DATA_SET,
    DENSE,
    IMAGES,
    INKS,
    OTHERS,
    OURS,
    TRAIN,
    points,
)
from jax_tt.optimizers import Adam, RowWiseAdagrad

BITS = "#2f9e44"
ROWS, COLUMNS = 1_000_000, 64
RULE = RowWiseAdagrad(0.1)
# Labels, tables and colours of the bars.
TABLES: dict[str, tuple[jax_tt.Table, str]] = {
    "dense, Adam": (jax_tt.dense_table(ROWS, COLUMNS, optimizer=Adam(0.1)), DENSE),
    "dense, row-wise Adagrad": (jax_tt.dense_table(ROWS, COLUMNS, optimizer=RULE), DENSE),
    "hash table": (jax_tt.hash_table(2**20, COLUMNS, optimizer=RULE), DENSE),
    "8 bits a number": (jax_tt.quantized_table(ROWS, COLUMNS, bits=8, optimizer=RULE), BITS),
    "4 bits a number": (jax_tt.quantized_table(ROWS, COLUMNS, bits=4, optimizer=RULE), BITS),
    "16 codes of a byte": (jax_tt.coded_table(ROWS, COLUMNS, num_codes=16), OURS),
    "tensor train, rank 32": (jax_tt.tt_table(ROWS, COLUMNS, tt_ranks=32, optimizer=RULE), TRAIN),
}


def main() -> None:
    for theme, ink in INKS.items():
        draw(IMAGES / f"choice-{theme}.svg", ink)


def draw(path: Path, ink: str) -> None:
    """One picture, its text and axes in the colour ``ink``."""
    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
    )
    # A fixed salt and no date: the same results give the same file.
    style: dict[Any, Any] = {**colours, "font.size": 10, "svg.hashsalt": "jax_tt"}
    with plt.rc_context(style):
        figure, axes = plt.subplot_mosaic(
            [["recall"], ["bytes"]],
            figsize=(curve_report.WIDTH, 6.8),
            layout="constrained",
            height_ratios=(6, 3.8),
        )
        draw_recall(axes["recall"])
        draw_bytes(axes["bytes"], ink)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def lines() -> dict[str, tuple[list[float], list[float], str]]:
    """By label: how many times smaller than dense tables, shares of their recall, and a colour.

    The dense tables are those that tables were made of, or would have been.
    """
    made, trained = points("frontier"), curve_report.means(points("curve"))
    sizes, shares, _ = zip(*frontier_report.line(made, DATA_SET, "auto"), strict=True)
    trained = [one for one in trained if one.data_set == DATA_SET]
    # Sums of tensor trains were made of dense tables with a spectral start, which are better than others.
    (dense,) = (one for one in trained if one.method == "dense_spectral")
    trains = [one for one in trained if one.method == "tt_residual_spectral"]
    bits = [frontier_report.trained(made, DATA_SET, kind)[:2] for kind in ("int8", "int4")]
    return {
        "dense": ([1], [1], DENSE),
        "trained with 8 and with 4 bits": (*map(list, zip(*bits, strict=True)), BITS),
        "trained dense, then jax_tt.compress": (list(sizes), list(shares), OURS),
        "trained dense, then sums of tensor trains": (
            [dense.bytes / (one.bytes + one.order_bytes) for one in trains],
            [one.recall / dense.recall for one in trains],
            TRAIN,
        ),
    }


def draw_recall(axis: Axes) -> None:
    for label, (sizes, shares, colour) in lines().items():
        axis.plot(sizes, shares, "o-", color=colour, markersize=4, label=label)
    axis.axhline(1, color=DENSE, linewidth=0.8, linestyle=":", zorder=0)
    axis.set_xscale("log")
    axis.set_xticks([1, 4, 8, 15, 30, 50, 100], ["1x", "4x", "8x", "15x", "30x", "50x", "100x"])
    axis.minorticks_off()
    axis.set_ylim(0, 1.08)
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axis.set_xlabel("smaller than dense tables by")
    axis.set_title("Share of the dense recall@20, Amazon-book", fontsize=10.5, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower left", frameon=False)


def bars() -> dict[str, tuple[float, float]]:
    """By label: MB of the rows, with all that finds them, and of the optimizer state."""
    return {
        label: (table.nbytes / 1e6, table.optimizer_nbytes / 1e6)
        for label, (table, _) in TABLES.items()
    }


def text(rows: float, state: float) -> str:
    """What stands beside a bar."""
    return f"{rows:,.0f} + {state:,.0f} MB" if round(state) else f"{rows:.3g} MB"


def draw_bytes(axis: Axes, ink: str) -> None:
    found = bars()
    rows, states = zip(*found.values(), strict=True)
    colours = [colour for _, colour in TABLES.values()]
    axis.barh(list(found), rows, color=colours, height=0.7)
    drawn = axis.barh(list(found), states, left=rows, color=OTHERS, height=0.7)
    axis.bar_label(drawn, [text(*sizes) for sizes in found.values()], padding=3, color=ink)
    axis.invert_yaxis()
    axis.set_xlim(0, 1150)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.set_title("1,000,000 rows of 64, optimizer state in grey", fontsize=10.5, loc="left")


if __name__ == "__main__":
    main()
