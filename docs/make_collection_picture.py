"""Draws images/collection.png: how a batch of several features passes through the tables of a collection.

    python -m docs.make_collection_picture

The collection is the one of docs/collections.md, and the vectors are those that it returns.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

import jax_tt
from docs.make_tt_picture import COLOURS, GREY, INK, arrow, label, matrix, tint
from jax_tt import optimizers

TABLES = {
    "user": jax_tt.dense_table(10_000, 16, optimizer=optimizers.RowWiseAdagrad(0.05)),
    "item": jax_tt.tt_table(50_000, 16, tt_ranks=8, optimizer=optimizers.Adagrad(0.02)),
    "ad": jax_tt.dense_table(500, 8),
}
FEATURES = {
    "user_id": jax_tt.Feature("user"),
    "clicked": jax_tt.Feature("item", combiner="mean"),
    "carted": jax_tt.Feature("item"),
    "shown": jax_tt.Feature("ad", combiner=None),
}
IDS = {
    "user_id": [[17], [4]],
    "clicked": [[3, 1, 4], []],
    "carted": [[1], [5, 9]],
    "shown": [[26, 5, 35], [8, 97, 93]],
}
ABOUT = {
    "user": "10,000 × 16, dense\nRowWiseAdagrad(0.05)",
    "item": "50,000 × 16, tensor train\nAdagrad(0.02)",
    "ad": "500 × 8, dense\nno rule: ordinary gradients",
}
COLOUR = dict(zip(TABLES, COLOURS, strict=True))
ROWS = {"user_id": 56.0, "clicked": 42.0, "carted": 29.0, "shown": 13.0}  # height of each feature
PLACES = {"user": 56.0, "item": 35.5, "ad": 13.0}
CELL = 1.3


def main() -> None:
    figure = plt.figure(figsize=(11.4, 7.2), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    for x, words in ((18.5, "features, a box per sample"), (63, "tables"), (101, "vectors")):
        label(axes, x, 68.5, words, 13, weight="bold")
    draw_features(axes)
    draw_tables(axes)
    draw_vectors(axes)
    words = "Gradients go back the same way: those of equal ids are summed, and each row is updated once."
    label(axes, 57, 3.0, words, 11.5, color=GREY)
    axes.set_xlim(0, 114)
    axes.set_ylim(0, 72)
    axes.set_aspect("equal")
    axes.set_axis_off()
    figure.savefig(Path(__file__).parent / "images" / "collection.png", dpi=110)


def draw_features(axes: Axes) -> None:
    for name, y in ROWS.items():
        colour = COLOUR[FEATURES[name].table]
        combiner = FEATURES[name].combiner
        words = "a sequence" if combiner is None else combiner
        label(axes, 2.5, y + 4.2, name, 12.5, weight="bold", color=colour, ha="left")
        label(axes, 13.5, y + 4.2, words, 10.5, color=GREY, ha="left")
        for k, ids in enumerate(IDS[name]):
            box = "round,pad=0.2,rounding_size=0.5"
            corner = 2.7 + 17 * k, y - 1.6
            axes.add_patch(
                FancyBboxPatch(corner, 15, 3.4, boxstyle=box, fc=tint(colour, 0.12), ec=colour)
            )
            for i, own in enumerate(ids):
                label(axes, corner[0] + 2.6 + 4.8 * i, y, str(own), 12)
        arrow(axes, (36.5, y), (48.5, _entry(name)), colour)


def draw_tables(axes: Axes) -> None:
    for name, y in PLACES.items():
        colour, height = COLOUR[name], 17.0 if name == "item" else 11.0
        corner = 49.0, y - height / 2
        axes.add_patch(Rectangle(corner, 28, height, fc=tint(colour, 0.1), ec=colour, lw=1.4))
        label(axes, 63, y + 2.6, name, 13, weight="bold", color=colour)
        label(axes, 63, y - 1.7, ABOUT[name], 10.5, color=INK, linespacing=1.5)
    label(axes, 63, 24.3, "both features are one batch of the table", 9.5, color=GREY)


def draw_vectors(axes: Axes) -> None:
    for name, vectors in look_up().items():
        colour, y = COLOUR[FEATURES[name].table], ROWS[name]
        arrow(axes, (77.5, _entry(name)), (90, y), colour)
        shape = " × ".join(map(str, vectors.shape))
        x = 90.5
        for part in vectors[None] if vectors.ndim == 2 else vectors:
            columns = part.shape[1]
            matrix(axes, x, y - part.shape[0] * CELL / 2, part, colour, CELL)
            x += columns * CELL + 1.2
        label(axes, 90.5, y + 3.4, shape, 11, ha="left", color=GREY)


def look_up() -> dict[str, np.ndarray]:
    """The vectors of every feature, scaled to one range for the picture."""
    collection = jax_tt.Collection(TABLES, FEATURES)
    batch = {
        "user_id": np.array(IDS["user_id"]),
        "clicked": jax_tt.Bags.from_ragged(IDS["clicked"]),
        "carted": jax_tt.Bags.from_ragged(IDS["carted"]),
        "shown": np.array(IDS["shown"]),
    }
    state = collection.init(jax.random.key(0))
    rows, _ = jax_tt.lookup_features(collection, state, batch)
    return {name: np.asarray(value / jnp.std(value)) for name, value in rows.items()}


def _entry(name: str) -> float:
    """Height at which a feature meets its table."""
    table = FEATURES[name].table
    shared = [own for own in FEATURES if FEATURES[own].table == table]
    return PLACES[table] + (0.0 if len(shared) == 1 else 4.0 - 8.0 * shared.index(name))


if __name__ == "__main__":
    main()
