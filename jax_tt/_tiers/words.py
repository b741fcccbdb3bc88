"""64-bit keys of the host as the two words that ops take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def to_words(keys: np.ndarray) -> np.ndarray:
    """Keys uint64 ``[n]`` as uint32 ``[n, 2]``, the high word first."""
    return np.stack([keys >> np.uint64(32), keys & np.uint64(2**32 - 1)], axis=-1).astype(np.uint32)


def to_integers(words: np.ndarray) -> np.ndarray:
    """The inverse of `to_words`."""
    high, low = np.moveaxis(np.asarray(words, np.uint64), -1, 0)
    return high << np.uint64(32) | low


def rounded_up(count: int, fewest: int = 1) -> int:
    """A size of at least ``count`` and ``fewest``, at most an eighth larger, so that few programs are compiled."""
    unit = 1 << max(0, (count - 1).bit_length() - 3)
    return max(fewest, -(-count // unit) * unit)


def padded(words: np.ndarray, fewest: int) -> tuple[np.ndarray, np.ndarray]:
    """Words with zeros up to `rounded_up` of their number, and which of them are present."""
    size = rounded_up(len(words), fewest)
    more = np.zeros((size, 2), np.uint32)
    more[: len(words)] = words
    return more, np.arange(size) < len(words)


def on_host(make: Callable[[], Any]) -> Any:
    """Arrays in host memory, whose ops run on the CPU."""
    return jax.device_put(make(), jax.local_devices(backend="cpu")[0])
