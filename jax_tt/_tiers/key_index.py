"""`KeyIndex`: numbers by 64-bit key, in the memory of the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base import ffi


class DictIndex:
    """The reference of the native index: a dict from keys uint64 to numbers int64 of at least 0."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def find_into(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Writes the numbers of keys to ``numbers``, -1 for missing keys."""
        numbers[:] = [self._numbers.get(key, -1) for key in keys.tolist()]

    def set(self, keys: np.ndarray, numbers: np.ndarray, before: np.ndarray) -> None:
        """Sets the numbers of keys, and writes the old ones to ``before``; of equal keys, the last one counts."""
        for k, (key, number) in enumerate(zip(keys.tolist(), numbers.tolist(), strict=True)):
            before[k] = self._numbers.get(key, -1)
            self._numbers[key] = number

    def erase(self, keys: np.ndarray, before: np.ndarray) -> None:
        """Removes keys, and writes their numbers to ``before``."""
        before[:] = [self._numbers.pop(key, -1) for key in keys.tolist()]


class KeyIndex:
    """Numbers by key, in the native index if there is one. Only one thread may use it at a time."""

    def __init__(self) -> None:
        native = ffi.load("cpu")
        self._index: Any = DictIndex() if native is None else native.KeyIndex()

    def __len__(self) -> int:
        return len(self._index)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The numbers int64 ``[n]`` of keys uint64 ``[n]``, -1 for missing keys."""
        numbers = np.empty(len(keys), np.int64)
        self._index.find_into(np.ascontiguousarray(keys), numbers)
        return numbers

    def set(self, keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Sets the numbers of keys; returns the old ones, -1 for new keys."""
        before = np.empty(len(keys), np.int64)
        self._index.set(np.ascontiguousarray(keys), np.ascontiguousarray(numbers), before)
        return before

    def erase(self, keys: np.ndarray) -> np.ndarray:
        """Removes keys; returns their numbers, -1 for missing keys."""
        before = np.empty(len(keys), np.int64)
        self._index.erase(np.ascontiguousarray(keys), before)
        return before
