"""Draws images/tt.png: how a row is read from a tensor-train table.

    python docs/make_tt_picture.py

The slices and the row are those of a real table, and the two squares have areas in the ratio of the sizes.
"""

from pathlib import Path
from typing import Any

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

import jax_tt

SHAPE = jax_tt.TTShape(11_000_000, 64, 32, (200, 220, 250), (4, 4, 4))
ROW = 6_543_210
COLOURS = ("#1f6fb2", "#d9641e", "#2c8a57")
INK, GREY, ROW_COLOUR = "#22262b", "#68717a", "#5b4b8a"
CENTRES = (35.0, 62.5, 90.0)  # of the three columns
CELL = 0.22  # side of one number of a slice
# Of a stack: how many sheets are drawn, how far apart, and how far one is pulled out.
SHEETS, STEP, LIFT = 11, 0.5, 3.6


def main() -> None:
    figure = plt.figure(figsize=(13, 7.2), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    digits = tuple(map(int, SHAPE.split_ids(np.array(ROW)).digits))
    slices, row = read_row(digits)
    draw_digits(axes, 64.0, digits)
    draw_stacks(axes, 40.5, digits, slices)
    draw_product(axes, 25.5, slices)
    draw_row(axes, 9.0, row)
    draw_sizes(axes)
    axes.set_xlim(0, 130)
    axes.set_ylim(0, 72)
    axes.set_aspect("equal")
    axes.set_axis_off()
    figure.savefig(Path(__file__).parent / "images" / "tt.png", dpi=110)


def read_row(digits: tuple[int, ...]) -> tuple[list[np.ndarray], np.ndarray]:
    """The three slices as matrices, and their product, which is checked against the library."""
    cores = jax_tt.tt.init(jax.random.key(4), SHAPE)
    first, second, third = (np.asarray(core[i]) for core, i in zip(cores, digits, strict=True))
    slices = [first[0], second.reshape(32, 128), third[:, :, 0]]
    row = (slices[0] @ slices[1]).reshape(16, 32) @ slices[2]
    rows = jax_tt.tt.lookup(cores, np.array([ROW]), method="reference")
    np.testing.assert_allclose(row.reshape(1, 64), rows, rtol=1e-4, atol=1e-6)
    return slices, row.reshape(1, 64)


def draw_digits(axes: Axes, y: float, digits: tuple[int, ...]) -> None:
    step(axes, y + 4.6, "1", "Write the row's number with three digits")
    label(axes, 6.2, y, f"row {ROW:,}", 13, weight="bold", ha="left")
    label(axes, CENTRES[0] - 6.2, y, "=", 14)
    factors = ("× 220 × 250   +", "× 250   +", "")
    for x, digit, factor, colour in zip(CENTRES, digits, factors, COLOURS, strict=True):
        chip(axes, x, y, str(digit), colour)
        label(axes, x + 4.6, y, factor, 12, ha="left", color=GREY)


def draw_stacks(axes: Axes, y: float, digits: tuple[int, ...], slices: list[np.ndarray]) -> None:
    step(axes, y + 12.5, "2", "Take the slice with that\nnumber from each core")
    sizes = ("200 slices of 4 × 32", "220 slices of 32 × 4 × 32", "250 slices of 32 × 4")
    for k, (x, values, colour) in enumerate(zip(CENTRES, slices, COLOURS, strict=True)):
        height, width = values.shape[0] * CELL, values.shape[1] * CELL
        left = x - (width + (SHEETS - 1) * STEP) / 2
        chosen = round(digits[k] / SHAPE.row_factors[k] * (SHEETS - 1))
        for sheet in reversed(range(SHEETS)):  # the front one last
            corner = (left + sheet * STEP, y + sheet * STEP)
            if sheet == chosen:
                matrix(axes, corner[0], corner[1] + LIFT, values, colour, CELL, 10 - sheet)
                top = (corner[0] + width / 2, corner[1] + LIFT + height)
                continue
            axes.add_patch(
                Rectangle(
                    corner,
                    width,
                    height,
                    fc=tint(colour, 0.15),
                    ec=tint(colour, 0.7),
                    lw=0.7,
                    zorder=10 - sheet,
                )
            )
        arrow(axes, (x, 62.4), top, colour)
        label(axes, x, y - 2.0, f"core {k + 1}", 12, weight="bold", color=colour)
        label(axes, x, y - 4.0, sizes[k], 10.5, color=GREY)


def draw_product(axes: Axes, y: float, slices: list[np.ndarray]) -> None:
    step(axes, y + 1.2, "3", "Multiply the slices")
    names = ("4 × 32", "32 × 4 × 32", "32 × 4")
    for x, values, colour, name in zip(CENTRES, slices, COLOURS, names, strict=True):
        height, width = values.shape[0] * CELL, values.shape[1] * CELL
        matrix(axes, x - width / 2, y - height / 2, values, colour, CELL)
        label(axes, x, y - 5.2, name, 10.5, color=GREY)
    right = [x + values.shape[1] * CELL / 2 for x, values in zip(CENTRES, slices, strict=True)]
    left = [x - values.shape[1] * CELL / 2 for x, values in zip(CENTRES, slices, strict=True)]
    for k in range(2):
        label(axes, (right[k] + left[k + 1]) / 2, y, "×", 18)


def draw_row(axes: Axes, y: float, row: np.ndarray) -> None:
    cell = 0.9
    label(axes, CENTRES[1], y + 4.8, "=", 18)
    x = CENTRES[1] - 32 * cell
    matrix(axes, x, y, row, ROW_COLOUR, cell)
    for column in range(1, 64):
        axes.plot([x + column * cell] * 2, [y, y + cell], color="white", lw=0.8, zorder=6)
    words = f"row {ROW:,}: 64 numbers, computed when it is looked up"
    label(axes, CENTRES[1], y - 2.2, words, 12, weight="bold", color=ROW_COLOUR)


def draw_sizes(axes: Axes) -> None:
    """The two ways to hold the table as squares of the right areas."""
    cost = SHAPE.cost()
    x, side = 115.5, 20.0
    axes.plot([101.5, 101.5], [4, 69], color="#dde1e5", lw=1.2)
    label(axes, x, 67.7, "What is stored", 12.5, weight="bold")
    axes.add_patch(Rectangle((x - side / 2, 37), side, side, fc="#e4e7ea", ec="#aab2ba", lw=1.0))
    label(axes, x, 62.5, "as an array", 12, weight="bold", color=GREY)
    label(axes, x, 60.0, "11,000,000 × 64", 10.5, color=GREY)
    label(axes, x, 48.6, f"{cost.dense_params:,}\nnumbers", 11.5)
    label(axes, x, 44.2, f"{cost.dense_bytes / 1e9:.1f} GB", 11.5)
    small = side / cost.compression**0.5
    axes.add_patch(Rectangle((x - small / 2, 21.6), small, small, fc=COLOURS[1], lw=0))
    label(axes, x, 29.0, "as a tensor train", 12, weight="bold")
    label(axes, x, 26.5, "the three cores", 10.5, color=GREY)
    label(axes, x, 17.9, f"{cost.params:,}\nnumbers", 11.5)
    label(axes, x, 13.5, f"{cost.bytes / 1e6:.1f} MB", 11.5)
    label(axes, x, 6.3, "areas to scale", 9.5, color=GREY, style="italic")


def step(axes: Axes, y: float, number: str, words: str) -> None:
    axes.add_patch(Circle((3.4, y), 1.35, color=INK))
    label(axes, 3.4, y - 0.05, number, 11.5, color="white", weight="bold")
    label(axes, 6.2, y, words, 11.5, ha="left", linespacing=1.35)


def chip(axes: Axes, x: float, y: float, words: str, colour: str) -> None:
    box = "round,pad=0.5,rounding_size=0.7"
    axes.add_patch(FancyBboxPatch((x - 2.9, y - 1.0), 5.8, 2.0, boxstyle=box, fc=colour, lw=0))
    label(axes, x, y - 0.05, words, 13, color="white", weight="bold")


def matrix(
    axes: Axes, x: float, y: float, values: np.ndarray, colour: str, cell: float, order: float = 5
) -> None:
    """Values as cells, light for low ones; the lower left corner is (x, y)."""
    rows, columns = values.shape
    shades = LinearSegmentedColormap.from_list("", [tint(colour, 0.08), colour])
    limit = 2.2 * float(values.std())
    box = (x, x + columns * cell, y, y + rows * cell)
    axes.imshow(
        values,
        cmap=shades,
        vmin=-limit,
        vmax=limit,
        extent=box,
        interpolation="nearest",
        zorder=order,
    )
    edge = {"fill": False, "ec": colour, "lw": 1.1, "zorder": order}
    axes.add_patch(Rectangle((x, y), columns * cell, rows * cell, **edge))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = "-|>,head_length=5,head_width=2.6"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, color=colour, lw=1.6, shrinkA=3, shrinkB=2)
    )


def label(axes: Axes, x: float, y: float, words: str, size: float, **options: Any) -> None:
    options = {"ha": "center", "va": "center", "color": INK} | options
    axes.text(x, y, words, fontsize=size, **options)


def tint(colour: str, share: float) -> tuple[float, ...]:
    """The colour mixed with white."""
    return tuple(1 - share * (1 - part) for part in to_rgb(colour))


if __name__ == "__main__":
    main()
