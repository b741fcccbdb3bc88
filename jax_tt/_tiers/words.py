"""64-bit keys of the host as the two words that ops take."""

from __future__ import annotations

import numpy as np


def to_words(keys: np.ndarray, size: int | None = None) -> np.ndarray:
    """Keys uint64 ``[n]`` as uint32 ``[size, 2]``, the high word first; zeros follow, by default none."""
    words = np.empty((len(keys) if size is None else size, 2), np.uint32)
    words[: len(keys), 0] = keys >> np.uint64(32)
    words[: len(keys), 1] = keys & np.uint64(2**32 - 1)
    words[len(keys) :] = 0
    return words


def to_integers(words: np.ndarray) -> np.ndarray:
    """The inverse of `to_words`."""
    return words[..., 0].astype(np.uint64) << np.uint64(32) | words[..., 1]


def rounded_up(count: int, fewest: int = 1) -> int:
    """A size of at least ``count`` and ``fewest``, at most an eighth larger, so that few programs are compiled."""
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return max(fewest, -(-count // unit) * unit)


def padded(keys: np.ndarray, fewest: int) -> tuple[np.ndarray, np.ndarray]:
    """Words of keys with zeros up to `rounded_up` of their number, and which of them are present."""
    size = rounded_up(len(keys), fewest)
    return to_words(keys, size), np.arange(size) < len(keys)
