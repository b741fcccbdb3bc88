"""Rows by their address, which are copied without a temporary array."""

from __future__ import annotations

import ctypes

import numpy as np

from jax_tt._base import ffi


def addresses(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The addresses uint64 ``[n]`` of rows of a contiguous array, which must outlive them."""
    assert array.flags.c_contiguous
    first: int = array.__array_interface__["data"][0]
    width = array.dtype.itemsize * (array[:1].size if len(array) else 0)
    return (rows * width + first).astype(np.uint64)


def copy_rows(sources: np.ndarray, targets: np.ndarray, size: int) -> None:
    """Copies ``size`` bytes from every address to the one beside it; no target overlaps another row."""
    native = ffi.load("cpu")
    if native is not None:
        native.copy_rows(np.ascontiguousarray(sources), np.ascontiguousarray(targets), size)
        return
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        ctypes.memmove(target, source, size)
