"""`Overflow`: rows on the device for keys whose sets are full of other keys of the same batch."""

from __future__ import annotations

import numpy as np

from jax_tt._tiers.key_index import KeyIndex


class Overflow:
    """Places that any key may take, from 0 to ``rows`` - 1; a new key takes that of the one used least recently.

    Args:
        rows: the number of places.
    """

    def __init__(self, rows: int):
        self._places = KeyIndex()
        self._keys, self._touched = np.zeros(rows, np.uint64), np.zeros(rows, np.int64)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def rows(self) -> int:
        """The number of places."""
        return len(self._keys)

    def touch(self, keys: np.ndarray, now: int) -> np.ndarray:
        """The places int64 ``[n]`` of keys uint64 ``[n]``, -1 for those without one; batch ``now`` requests them."""
        places = self._places.find(keys)
        self._touched[places[places >= 0]] = now
        return places

    def insert(
        self, keys: np.ndarray, now: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """The places of distinct new keys in ascending order, the keys that were there, and which of them are keys.

        None where batch ``now`` requests too many of the others.
        """
        places = np.sort(np.argsort(self._touched, kind="stable")[: len(keys)])
        if len(places) < len(keys) or (self._touched[places] == now).any():
            return None
        old, full = self._keys[places], self._touched[places] > 0
        self._places.erase(old[full])
        self._places.set(keys, places)
        self._keys[places], self._touched[places] = keys, now
        return places, old, full

    def reset(self, keys: np.ndarray, full: np.ndarray) -> None:
        """Puts these keys uint64 ``[rows]`` in the places that are full."""
        self._places = KeyIndex()
        self._places.set(keys[full], np.flatnonzero(full))
        self._keys, self._touched = keys.copy(), full.astype(np.int64)
