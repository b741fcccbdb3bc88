"""Searches codebooks for the rows, or the sums of rows, that are nearest to given ones."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jax_tt._base import ffi

# Sums of codes that are kept while further codes are chosen.
_BEAM = 4
# Rounds in which every code of a row is chosen anew, given the others.
_SWEEPS = 3
# Scores that the reference computes at a time, which stay in the cache.
_BLOCK = 2**18
# Rows that the native search sweeps together until none of them changes, as kSearchRows of search_kernels.h.
_TOGETHER = 4
# Products of numbers that take a thread a few milliseconds.
_OF_A_THREAD = 2**26


def nearest(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Numbers int32 ``[n]`` of the centers ``[K, d]`` that are nearest to points ``[n, d]``; of several, the first."""
    return search_sums(points, centers[None])[:, 0]


def search_sums(rows: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    """Codes int32 ``[n, m]`` of rows ``[n, d]`` in codebooks ``[m, K, d]``.

    Their sums are near, but not always the nearest: codes are chosen one after another, keeping the best few sums, and
    then anew, each given the others.
    """
    native = ffi.load("cpu")
    if native is None:
        return reference_sums(rows, codebooks)
    rows, codebooks = (np.ascontiguousarray(given, np.float32) for given in (rows, codebooks))
    codes = np.empty((len(rows), len(codebooks)), np.int32)

    def search(start: int, stop: int) -> None:
        native.choose_sums(rows[start:stop], codebooks, _BEAM, _SWEEPS, codes[start:stop])

    threads = min(len(os.sched_getaffinity(0)), 1 + len(rows) * codebooks.size // _OF_A_THREAD)
    if threads == 1:
        search(0, len(rows))
        return codes
    # Further sweeps may change codes by rounding, so that the same rows are swept together on any number of cores.
    groups = np.linspace(0, -(-len(rows) // _TOGETHER), threads + 1, dtype=int)
    ends = np.minimum(_TOGETHER * groups, len(rows)).tolist()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(search, ends[:-1], ends[1:]))
    return codes


def remainders(points: np.ndarray, codes: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    """The points less the codebook rows of their codes."""
    left = points.copy()
    for k, codebook in enumerate(codebooks):
        here = codes[:, k] >= 0
        if here.all():  # as it is almost always
            left -= codebook[codes[:, k]]
        else:
            left[here] -= codebook[codes[here, k]]
    return left


def reference_sums(rows: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    """`search_sums` in numpy."""
    if len(codebooks) == 1:
        return _nearest(rows, codebooks[0])[:, None]
    codes = _searched(rows, codebooks)
    left = remainders(rows, codes, codebooks)
    for _ in range(_SWEEPS):
        _improve(codes, left, codebooks)
    return codes


def _nearest(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    codes = np.empty(len(points), np.int32)
    half, columns = 0.5 * np.einsum("kd,kd->k", centers, centers), np.ascontiguousarray(centers.T)
    step = max(1, _BLOCK // len(centers))
    for start in range(0, len(points), step):
        scores = points[start : start + step] @ columns
        scores -= half
        codes[start : start + step] = np.argmax(scores, axis=1)
    return codes


def _searched(rows: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    """Codes int32 ``[n, m]`` by beam search: code after code, keeping the best few sums."""
    codes = np.empty((len(rows), len(codebooks)), np.int32)
    step = max(1, _BLOCK // (_BEAM * codebooks.shape[1]))
    squares = np.einsum("mkd,mkd->mk", codebooks, codebooks)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        lines = np.arange(len(block))[:, None]
        left, errors = block[:, None], np.zeros((len(block), 1), np.float32)
        chosen = np.empty((len(block), 1, 0), np.int32)
        for codebook, lengths in zip(codebooks, squares, strict=True):
            scores = left @ (-2 * codebook.T)
            scores += lengths
            scores += errors[..., None]
            best, errors = _least(scores.reshape(len(block), -1), _BEAM)
            source, last = np.divmod(best, len(codebook))
            left = left[lines, source] - codebook[last]
            longer = [chosen[lines, source], last[..., None]]
            chosen = np.concatenate(longer, axis=2, dtype=np.int32)
        codes[start : start + step] = chosen[lines[:, 0], np.argmin(errors, axis=1)]
    return codes


def _least(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns and values ``[n, count]`` of the least scores of every row, at most all of them; overwrites scores."""
    lines, best, least = np.arange(len(scores)), [], []
    for _ in range(min(count, scores.shape[1])):
        # A few passes over the scores take less time than a partition of them.
        at = np.argmin(scores, axis=1)
        best.append(at)
        least.append(scores[lines, at])
        scores[lines, at] = np.inf
    return np.stack(best, axis=1), np.stack(least, axis=1)


def _improve(codes: np.ndarray, left: np.ndarray, codebooks: np.ndarray) -> None:
    """Chooses every code anew, given the others, in place; ``left`` are rows less their sums."""
    for k, codebook in enumerate(codebooks):
        left += codebook[codes[:, k]]
        codes[:, k] = _nearest(left, codebook)
        left -= codebook[codes[:, k]]
