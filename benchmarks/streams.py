"""Real streams of ids, if they are available next to the checkout, and Zipf ids for comparison."""

import lzma
import os
from pathlib import Path

import numpy as np

from benchmarks.ids import zipf_ids


def streams(quick: bool) -> dict[str, tuple[np.ndarray, int]]:
    """Ids in the order of their requests, and the number of rows, by name."""
    count, rows = (2_000, 1_000) if quick else (300_000, 1_000_000)
    found = {"Zipf 1.05": (zipf_ids(np.random.default_rng(0), rows, count).astype(np.int32), rows)}
    data = Path(os.environ.get("JAX_TT_DATA", "../shared/data"))
    if quick:
        return found
    if (data / "video.txt.xz").exists():
        found["Video"] = _counted([line[1:2] for line in _lines(data / "video.txt.xz")])
    if (data / "amazon_book_train.txt.xz").exists():
        users = [line[1:] for line in _lines(data / "amazon_book_train.txt.xz")]
        # The file goes user by user; a training run draws interactions at random.
        ids, rows = _counted(users)
        found["Amazon-book"] = np.random.default_rng(0).permutation(ids), rows
    return found


def _lines(path: Path) -> list[list[str]]:
    with lzma.open(path, "rt") as file:
        return [line.split() for line in file]


def _counted(lines: list[list[str]]) -> tuple[np.ndarray, int]:
    ids = np.array([int(word) for line in lines for word in line], np.int32)
    return ids, int(ids.max()) + 1


def drifting(share: float, quick: bool = False) -> tuple[np.ndarray, int]:
    """Batches ``[n, b]`` in which a share of the popular rows changes from each to the next, and the number of rows.

    One row in a hundred is popular. These rows get four fifths of the requests, by Zipf's law with an exponent of 0.8;
    the other requests are uniform over all rows.
    """
    batches, size, rows = (20, 256, 5_000) if quick else (300, 4096, 100_000)
    rng = np.random.default_rng(0)
    favourites = rng.permutation(rows)[: rows // 100]
    weights = np.arange(1, favourites.size + 1) ** -0.8
    drawn = []
    for _ in range(batches):
        replaced = rng.permutation(favourites.size)[: rng.binomial(favourites.size, share)]
        favourites[replaced] = rng.integers(0, rows, replaced.size)
        hot = favourites[rng.choice(favourites.size, size, p=weights / weights.sum())]
        drawn.append(np.where(rng.random(size) < 0.8, hot, rng.integers(0, rows, size)))
    return np.stack(drawn).astype(np.int32), rows
