"""Real streams of ids, where they lie beside the checkout, and Zipf ids to hold them against."""

import lzma
import os
from pathlib import Path

import numpy as np

from benchmarks.ids import zipf_ids


def streams(quick: bool) -> dict[str, tuple[np.ndarray, int]]:
    """Ids in the order they are asked for, and the number of rows, by name."""
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
