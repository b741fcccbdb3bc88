"""Draws images/write_back.png and images/miss_ratio.png, from real streams of ids.

    JAX_TT_DATA=../shared/data python -m docs.make_cache_picture

Without the streams there is nothing to draw.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import jax_tt
from benchmarks.streams import streams
from benchmarks.write_back import Record, rewritten, train

IMAGES = Path(__file__).parent / "images"
RIDGES = (0.01, 0.1, 0.3, 1.0)
COUNTS = (4, 16, 64, 200)


def main() -> None:
    found = streams(quick=False)
    draw_write_back(found["Video"][0])
    draw_miss_ratios({name: found[name][0] for name in ("Video", "Amazon-book")})


def draw_write_back(items: np.ndarray) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for rank, policy, colour in ((16, "lfu", "C0"), (32, "lru", "C1")):
        records = [r for r in train(items, rank, policy, steps=500, every=25) if r.evicted]
        label = f"rank {rank}, {policy.upper()}: {records[0].compression:.0f}x smaller"
        steps = [r.step for r in records]
        axes[0].plot(steps, [100 * r.left for r in records], "o-", c=colour, label=label)
        axes[0].plot(steps, [100 * r.moved for r in records], "s:", c=colour, mfc="white")
        print(f"{label}; {sum(r.evicted for r in records)} rows evicted", *summary(records))
        draw_record(axes[1:], records[-1], int(items.max()) + 1, colour, label)
    axes[0].axhline(10, c="grey", lw=0.8)
    axes[0].set(xlabel="training step", ylabel="%", yscale="log", title="At every populate")
    axes[0].plot([], [], "ko-", label="left of what evicted rows learned")
    axes[0].plot([], [], "ks:", mfc="white", label="squared change of the other rows")
    axes[1].set(xlabel="rows evicted at once", xscale="log", ylabel="% left", ylim=(0, None))
    axes[1].set_title("More rows are harder to fit")
    axes[2].set(xlabel="% left of what evicted rows learned", xscale="log")
    axes[2].set_ylabel("squared change of the others /\nof what the rows learned")
    axes[2].set_title("The ridge: rows against the others")
    for axis in axes:
        axis.legend(fontsize=7)
    save(figure, "write_back")


def draw_record(axes: Any, record: Record, rows: int, colour: str, label: str) -> None:
    """One populate again, with fewer rows and with other ridges."""
    counts = sorted({min(count, record.evicted) for count in COUNTS})
    left = [100 * rewritten(record, n, jax_tt.cache.WriteBack(), rows)[1] for n in counts]
    axes[0].plot(counts, left, "o-", c=colour, label=label)
    points = []
    for ridge in RIDGES:
        options = jax_tt.cache.WriteBack(ridge=ridge)
        _, kept, damage, _ = rewritten(record, record.evicted, options, rows)
        points.append((100 * kept, damage))
        axes[1].annotate(
            f"{ridge:g}", points[-1], fontsize=7, xytext=(3, 3), textcoords="offset points"
        )
    axes[1].plot(*zip(*points, strict=True), "o-", c=colour, label=label)
    axes[1].axhline(record.compression, c=colour, lw=0.8, ls="--")
    print(
        f"  {counts} rows: {np.round(left, 1)} % left; ridge {RIDGES}: {np.round(points, 2).tolist()}"
    )


def summary(records: list[Record]) -> list[str]:
    learned = np.array([r.learned for r in records])
    left = np.array([r.left for r in records])
    damage = (np.array([r.damage for r in records]) * learned).sum() / learned.sum()
    moved = max(r.moved for r in records)
    return [
        f"left {100 * (left * learned).sum() / learned.sum():.1f} %, at most {100 * left.max():.1f} %;",
        f"others: {damage:.1f} x what was learned, at most {100 * moved:.2f} % of themselves",
    ]


def draw_miss_ratios(found: dict[str, np.ndarray]) -> None:
    figure, axes = plt.subplots(1, len(found), figsize=(10, 3.6), sharey=True, layout="constrained")
    for axis, (name, ids) in zip(axes, found.items(), strict=True):
        one_percent = (int(ids.max()) + 1) // 100
        for policy in ("lru", "ideal"):
            jax_tt.cache.miss_ratio_curve(ids, policy=policy).plot(axis, label=policy)
            at = jax_tt.cache.miss_ratio_curve(ids, [one_percent], policy=policy).miss_ratios[0]
            print(f"{name}: {policy} misses {100 * at:.1f} % with 1 % of the rows")
        axis.axvline(one_percent, c="grey", lw=0.8)
        axis.text(one_percent, 0.03, " 1 % of the rows", fontsize=8)
        axis.set_title(f"{name}: {ids.size:,} requests")
        axis.legend()
    save(figure, "miss_ratio")


def save(figure: Any, name: str) -> None:
    target = IMAGES / f"{name}.png"
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
