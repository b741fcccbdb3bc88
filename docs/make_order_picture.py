"""Draws images/id_order.png: the effect of an order of ids on Amazon-book.

    JAX_TT_DATA=../shared/data python -m docs.make_order_picture

Without the interactions there is nothing to draw.
"""

import os
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import jax_tt
from examples.retrieval import data
from jax_tt.order import IdOrder, from_counts, from_interactions

TARGET = Path(__file__).parent / "images" / "id_order.png"
BINS, REQUESTS = 56, 1024
REUSE = (0, 0.5, 1, 2, 4, 8)


def main() -> None:
    read = data.load(Path(os.environ.get("JAX_TT_DATA", "../shared/data")))
    shape = jax_tt.TTShape.suggest(read.num_items, 64, 16)
    pairs = (read.train_users, read.train_items)
    ordered = {
        reuse: from_interactions(pairs, shape, reuse=reuse, progress=False) for reuse in REUSE
    }
    plain = IdOrder.identity(read.num_items)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axis, title, order in (
        (axes[0], "Original order", plain),
        (axes[1], "from_interactions", ordered[0]),
    ):
        draw_together(axis, read, order)
        axis.set_title(title)
    others = {
        "random": IdOrder(np.random.default_rng(0).permutation(read.num_items)),
        "original": plain,
        "from_counts": from_counts(np.bincount(read.train_items, minlength=read.num_items)),
    }
    draw_trade_off(axes[2], read, shape, ordered, others)
    figure.savefig(TARGET, dpi=110)
    print(f"wrote {TARGET}")


def draw_together(axis: Any, read: data.Interactions, order: IdOrder) -> None:
    """How many times more often than by chance a user takes items of two blocks of rows."""
    block = order.rows.astype(np.int64) * BINS // read.num_items
    taken = np.zeros((read.num_users, BINS), np.float32)
    np.add.at(taken, (read.train_users, block[read.train_items]), 1)
    together = taken.T @ taken
    together[np.diag_indices(BINS)] -= taken.sum(0)  # an item beside itself
    alone = together.sum(0)
    ratio = together / (alone[:, None] * alone / alone.sum())
    image = axis.imshow(np.log2(np.maximum(ratio, 2**-4)), cmap="RdBu_r", vmin=-4, vmax=4)
    axis.set(xlabel="row of an item, in 56 blocks", ylabel="row of another item of the user")
    axis.figure.colorbar(image, ax=axis, label="log2 of (together / by chance)", shrink=0.8)


def draw_trade_off(
    axis: Any,
    read: data.Interactions,
    shape: jax_tt.TTShape,
    ordered: dict[float, IdOrder],
    others: dict[str, IdOrder],
) -> None:
    points = {f"reuse={reuse:g}": figures(read, shape, order) for reuse, order in ordered.items()}
    axis.plot(*zip(*points.values(), strict=True), "o-", c="C0", label="from_interactions")
    for name, order in others.items():
        points[name] = figures(read, shape, order)
        axis.plot(*points[name], "ks", mfc="white")
    for name, (prefixes, together) in points.items():
        print(f"{name}: {prefixes:.1f} % prefixes, {together:.1f} % together")
        axis.annotate(
            name, (prefixes, together), fontsize=7, xytext=(3, 4), textcoords="offset points"
        )
    axis.set(xlabel="distinct prefixes, % of distinct ids", ylim=(0, None))
    axis.set_ylabel("% of a user's items that share the first digit\nof a held-out item")
    axis.set_title("Quality and speed")
    axis.legend(fontsize=7)


def figures(read: data.Interactions, shape: jax_tt.TTShape, order: IdOrder) -> tuple[float, float]:
    """Distinct prefixes of a batch, and items that share the first digit with one that was held out, in per cent."""
    batch = np.random.default_rng(0).choice(read.train_items, REQUESTS)
    prefix = order.rows // shape.row_factors[-1]
    prefixes = len(np.unique(prefix[batch])) / len(np.unique(batch))
    digit = prefix // shape.row_factors[-2]
    taken = np.zeros((read.num_users, shape.row_factors[0]), np.float32)
    np.add.at(taken, (read.train_users, digit[read.train_items]), 1)
    shares = taken / np.maximum(taken.sum(1, keepdims=True), 1)
    together = shares[read.test_users, digit[read.test_items]].mean()
    return 100 * prefixes, 100 * float(together)


if __name__ == "__main__":
    main()
