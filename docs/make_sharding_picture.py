"""Draws images/sharding.png: pages of tables on devices, and what travels between these in a step.

    python -m docs.make_sharding_picture

The places of the pages are those that `jax_tt.Placement` chooses.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from docs.make_tt_picture import COLOURS, GREY, INK, label, tint
from jax_tt import Placement

DEVICES = 4
# Rows, and where they are.
TABLES = {
    "user": (8_000, Placement.round_robin(1_000), "round_robin(1000)"),
    "item": (4_000, Placement.pages([(0, 1), 2, 3, (3, 2)], 1_000), "pages([(0, 1), 2, 3, (3, 2)], 1000)"),
    "ad": (400, Placement.replicated(), "replicated()"),
}  # fmt: skip
WIDTH, GAP, PAGE = 17.0, 6.0, 3.4
MESSAGES = (
    ("ids", "to the devices that hold their rows, each id once"),
    ("rows", "back to the devices that asked for them"),
    ("gradients", "summed per row, to all replicas"),
)


def main() -> None:
    figure = plt.figure(figsize=(11.6, 5.43), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    for device in range(DEVICES):
        draw_device(axes, device)
    for k, ((name, (rows, _, words)), colour) in enumerate(
        zip(TABLES.items(), COLOURS, strict=True)
    ):
        y = 57.0 - 4.6 * k
        axes.add_patch(Rectangle((94.5, y - 1.0), 2.0, 2.0, fc=tint(colour, 0.45), ec=colour))
        label(axes, 97.6, y + 0.8, f"{name}, {rows:,} rows", 11.5, ha="left", weight="bold")
        label(axes, 97.6, y - 1.0, words, 9.0, ha="left", color=GREY)
    draw_messages(axes)
    axes.set_xlim(0, 126)
    axes.set_ylim(8, 67)
    axes.set_aspect("equal")
    axes.set_axis_off()
    figure.savefig(Path(__file__).parent / "images" / "sharding.png", dpi=110)


def left_of(device: int) -> float:
    return 2.0 + device * (WIDTH + GAP)


def draw_device(axes: Axes, device: int) -> None:
    left = left_of(device)
    box = FancyBboxPatch(
        (left, 36), WIDTH, 25, boxstyle="round,pad=0.2,rounding_size=1", fc="white", ec=INK, lw=1.3
    )
    axes.add_patch(box)
    label(axes, left + WIDTH / 2, 63.4, f"device {device}", 12.5, weight="bold")
    y = 60.0
    for (name, (rows, placement, _)), colour in zip(TABLES.items(), COLOURS, strict=True):
        layout = placement.layout(rows, DEVICES)
        table = layout.page_table
        for place in range(layout.pool):
            y -= PAGE + 0.6
            pages = (table == device * layout.pool + place).any(axis=1).nonzero()[0]
            if not len(pages):
                draw_page(axes, left, y, "free", GREY, empty=True)
                continue
            (page,) = pages.tolist()
            copies = int((table[page] >= 0).sum())
            first = page * layout.page_size
            last = min(first + layout.page_size, rows) - 1
            words = f"{name} {first}-{last}" + (", replica" if copies > 1 else "")
            draw_page(axes, left, y, words, colour)
        y -= 0.9


def draw_page(
    axes: Axes, left: float, y: float, words: str, colour: str, *, empty: bool = False
) -> None:
    face = "white" if empty else tint(colour, 0.45)
    style = {"ls": "--"} if empty else {}
    axes.add_patch(Rectangle((left + 0.8, y), WIDTH - 1.6, PAGE, fc=face, ec=colour, lw=1, **style))
    label(axes, left + WIDTH / 2, y + PAGE / 2, words, 7.6, color=GREY if empty else INK)


def draw_messages(axes: Axes) -> None:
    begin, end = left_of(0) + 2, left_of(DEVICES - 1) + WIDTH - 2
    for k, (name, words) in enumerate(MESSAGES):
        y = 28.0 - 7.2 * k
        axes.annotate(
            "", (end, y), (begin, y), arrowprops={"arrowstyle": "<|-|>", "color": INK, "lw": 1.5}
        )
        for device in range(DEVICES):
            x = left_of(device) + WIDTH / 2
            axes.plot([x, x], [y - 0.8, y + 0.8], color=INK, lw=1.5)
        label(axes, 94.5, y + 1.0, f"all-to-all of {name}", 11.5, ha="left", weight="bold")
        label(axes, 94.5, y - 1.0, words, 8.6, ha="left", color=GREY)


if __name__ == "__main__":
    main()
