"""`KeyFilter`: which 64-bit keys a store may hold, in two bytes a key."""

from __future__ import annotations

import numpy as np

# Bits a key, and those that are set for it: of other keys, 0.24 % pass.
_BITS, _PROBES = 16, 4
_FIRST = 1 << 20


class KeyFilter:
    """A Bloom filter whose memory grows with its keys: where it is full, another one of twice the size is added.

    Args:
        bits: of the first filter, a power of two.
    """

    def __init__(self, bits: int = _FIRST):
        self._parts = [np.zeros(bits // 8, np.uint8)]
        # Keys for which bits of the last part were set.
        self._count = 0

    def add(self, keys: np.ndarray) -> None:
        """Adds keys uint64 ``[n]``."""
        new = keys[~self.may_hold(keys)]
        last = self._parts[-1]
        if (self._count + len(new)) * _BITS > 8 * len(last) and self._count:
            last, self._count = np.zeros(2 * len(last), np.uint8), 0
            self._parts.append(last)
        self._count += len(new)
        places, masks = _bits(_hashes(new), len(last))
        np.bitwise_or.at(last, places.reshape(-1), masks.reshape(-1))

    def may_hold(self, keys: np.ndarray) -> np.ndarray:
        """True for all keys that were added, and for few others, bool ``[n]``."""
        hashes, found = _hashes(keys), np.zeros(len(keys), bool)
        for part in self._parts:
            places, masks = _bits(hashes, len(part))
            found |= ((part[places] & masks) != 0).all(axis=0)
        return found


def _hashes(keys: np.ndarray) -> np.ndarray:
    """Bits that all depend on all bits of the keys: the last steps of MurmurHash3."""
    hashes = keys ^ keys >> np.uint64(33)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        hashes = hashes * np.uint64(factor)
        hashes ^= hashes >> np.uint64(33)
    return hashes


def _bits(hashes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes ``[probes, n]`` of keys in a part of ``size`` bytes, and their bits in these."""
    steps = hashes >> np.uint64(32) | np.uint64(1)
    probes = np.arange(_PROBES, dtype=np.uint64)[:, None]
    bits = hashes + probes * steps & np.uint64(8 * size - 1)
    return (bits >> np.uint64(3)).astype(np.int64), np.uint8(1) << (bits & np.uint64(7)).astype(
        np.uint8
    )
