"""Checksums of bytes that come back from disk."""

from __future__ import annotations

import functools

import numpy as np

# What zeros, such as a page that was never written, do not have as their checksum.
_START = 0x9E3779B97F4A7C15


def checksums(rows: np.ndarray) -> np.ndarray:
    """A number of 64 bits for every row of bytes, uint8 ``[n, size]``, as uint64 ``[n]``.

    It is the sum of words of 64 bits times odd numbers, so that a change within one word is always noticed, and any
    other with a probability of 1 - 2^-64. numpy computes it at several GB/s, also for many short rows.
    """
    count, size = rows.shape
    whole = size - size % 8
    found = np.full(count, _START * (size + 1) % 2**64 | 1, np.uint64)
    factors = _factors(-(-size // 8))
    if whole:
        found += np.einsum("ij,j->i", rows[:, :whole].view(np.uint64), factors[: whole // 8])
    if size % 8:
        rest = np.zeros((count, 8), np.uint8)
        rest[:, : size % 8] = rows[:, whole:]
        found += rest.view(np.uint64)[:, 0] * factors[-1]
    return found


def checksum(data: bytes | np.ndarray) -> int:
    """The checksum of some bytes."""
    return int(checksums(np.frombuffer(data, np.uint8).reshape(1, -1))[0])


@functools.lru_cache(maxsize=64)
def _factors(count: int) -> np.ndarray:
    return np.random.Philox(key=1).random_raw(count) | np.uint64(1)
