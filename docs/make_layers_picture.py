"""Draws images/layers.png: the folders of the package by layer, and which imports which.

python -m docs.make_layers_picture
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from scripts.layers import LAYERS, PACKAGE, between_folders, lines

TARGET = Path(__file__).parent / "images" / "layers.png"
WHAT = (
    "arguments, dtypes, native modules, progress",
    "JAX's transformations; bytes and arrays; update rules",
    "what a batch is: bags, keys, orders",
    "mathematics of tensor trains; sets of keys and cached rows",
    "the contract of a table",
    "custom calls; the differentiation rule",
    "kinds of tables",
    "operations on arrays and on tables",
    "many tables in one call; orders of ids",
    "tables in files; rows in host memory and on disk",
    "making small tables",
    "choosing kinds, caches and devices",
    "layers for Flax",
    "public modules and the command line",
)
COLOURS = ("#e3ecf7", "#f6eddc")
WIDTH, HEIGHT, GAP = 16.0, 0.62, 0.5


def main() -> None:
    figure, axes = plt.subplots(figsize=(15, 11), layout="constrained")
    sizes = lines(PACKAGE)
    centres = draw_folders(axes, sizes)
    draw_imports(axes, centres, direct(between_folders(PACKAGE)))
    axes.set(xlim=(-4.9, WIDTH + 0.2), ylim=(-0.4, len(LAYERS) * (HEIGHT + GAP)))
    axes.axis("off")
    figure.savefig(TARGET, dpi=90)
    print(f"wrote {TARGET}")


def draw_folders(axes: plt.Axes, sizes: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Draws a box for each folder; returns their centres."""
    centres = {}
    for level, (folders, what) in enumerate(zip(LAYERS, WHAT, strict=True)):
        bottom = level * (HEIGHT + GAP)
        axes.text(-0.2, bottom + HEIGHT / 2, f"{what}  ", ha="right", va="center", fontsize=9)
        width = (WIDTH - 0.15 * (len(folders) - 1)) / len(folders)
        for k, folder in enumerate(folders):
            left = k * (width + 0.15)
            box = FancyBboxPatch(
                (left, bottom), width, HEIGHT, boxstyle="round,pad=0,rounding_size=0.1"
            )
            box.set(facecolor=COLOURS[level % 2], edgecolor="0.4", zorder=2)
            axes.add_patch(box)
            name = folder.removeprefix("_kinds.") if folder else "nnx, linen, ..., cli"
            text = f"{name}\n{sizes[folder]:,} lines"
            centres[folder] = left + width / 2, bottom
            axes.text(
                left + width / 2, bottom + HEIGHT / 2, text, ha="center", va="center", fontsize=8
            )
    return centres


def draw_imports(
    axes: plt.Axes, centres: dict[str, tuple[float, float]], imports: set[tuple[str, str]]
) -> None:
    for importer, imported in sorted(imports):
        (x, y), (to_x, to_y) = centres[importer], centres[imported]
        arrow = {"arrowstyle": "-|>", "color": "0.45", "lw": 0.9}
        axes.annotate("", (to_x, to_y + HEIGHT), (x, y), arrowprops=arrow, zorder=1)


def direct(imports: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The imports that no chain of others implies."""
    below = {folder: set[str]() for layer in LAYERS for folder in layer}
    for importer, imported in imports:
        below[importer].add(imported)
    reached: dict[str, set[str]] = {}
    for folder, imported in below.items():
        reached[folder] = imported.union(*(reached[other] for other in imported))
    return {
        (importer, imported)
        for importer, imported in imports
        if not any(imported in reached[other] for other in below[importer])
    }


if __name__ == "__main__":
    main()
