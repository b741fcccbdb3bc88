"""Fits the codebooks of coded tables, and chooses codes in them.

A product has codes for each part of the columns. The codes of a part are additive: their codebook rows are added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy

from jax_tt._base.progress import Progress
from jax_tt._kinds.coded.clusters import kmeans, means, sums_of
from jax_tt._kinds.coded.layout import CodeLayout
from jax_tt._kinds.coded.search import nearest, remainders, search_sums

# Iterations of k-means that take about as long as solving for all codebooks and searching for all codes.
_ROUND = 4
# Rows of codebooks up to which there are more rounds, as these take little time and errors are large.
_FEW, _MORE_ROUNDS = 2**7, 4
# Rows of codebooks up to which all of them are solved for together, in cubic time, unless there are fewer points.
_MOST_SOLVED = 2**12


def fit_codebooks(
    layout: CodeLayout,
    points: np.ndarray,
    weights: np.ndarray,
    hot: np.ndarray,
    rotation: Any,
    iterations: int,
    rng: np.random.Generator,
    bar: Progress,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Fits codebooks float32 ``[m * K, D / m]`` and the rotation ``[D, D]``, or None, to points ``[s, D]``.

    ``weights[s]`` are the importance of the points, ``hot`` says which of them have more codes, bool ``[s]``, and
    ``rotation`` is a matrix, ``"fit"``, or None. There are ``iterations`` of k-means from codebooks that ``rng`` draws.
    """
    m, size = layout.column_parts, 1 << layout.bits
    fits = isinstance(rotation, str)
    matrix = _principal(points, weights, m) if fits else rotation
    step = bar.begin("codebooks", layout.all_codes + (m if fits else 0))

    def codebook(part: np.ndarray, iterations: int) -> np.ndarray:
        rows = kmeans(part, weights, size, iterations, rng)
        step()
        return rows

    def codebooks_of(turned: np.ndarray) -> np.ndarray:
        parts = [
            codebook(part, iterations)
            if layout.all_codes == m
            else fit_sums(layout, part, weights, hot, iterations, rng, step)
            for part in _parts(turned, m)
        ]
        return np.concatenate(parts)

    if not fits:
        return codebooks_of(points if matrix is None else points @ matrix.T), matrix
    # Of sums, the rotation is the one for their first codes.
    turned = points @ matrix.T
    codebooks = [codebook(part, 4) for part in _parts(turned, m)]
    for _ in range(iterations):
        near = []
        for k, part in enumerate(_parts(turned, m)):
            codes = nearest(part, codebooks[k])
            codebooks[k] = means(part, weights, codes, codebooks[k])
            near.append(codebooks[k][codes])
        # The rotation that takes the rows that codes stand for closest to the points.
        u, _, vt = np.linalg.svd(np.concatenate(near, axis=1).T @ (weights[:, None] * points))
        matrix = (u @ vt).astype(np.float32)
        turned = points @ matrix.T
    return codebooks_of(turned), matrix


def choose_codes(rows: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    """Chooses codes int32 ``[n, parts * terms]`` of rows ``[n, D]`` in codebooks ``[parts, terms, K, D / parts]``."""
    parts = zip(_parts(rows, len(codebooks)), codebooks, strict=True)
    return np.concatenate([choose_sums(*part) for part in parts], axis=1)


def fit_sums(
    layout: CodeLayout,
    points: np.ndarray,
    weights: np.ndarray,
    hot: np.ndarray,
    iterations: int,
    rng: np.random.Generator,
    step: Callable[[], object],
) -> np.ndarray:
    """Fits codebooks float32 ``[terms * K, width]`` to points ``[s, width]``; calls ``step`` for each codebook.

    Only points that are ``hot``, bool ``[s]``, use the last ``layout.hot_terms`` codebooks.
    """
    m, size = layout.part_terms, 1 << layout.bits
    codebooks = np.zeros((m, size, layout.width), np.float32)
    codes = np.full((len(points), m), -1, np.int32)
    left = points.copy()
    for k in range(m):
        users = slice(None) if k < m - layout.hot_terms else hot
        # In a sample there may be no hot points.
        if len(left[users]):
            codebooks[k] = kmeans(left[users], weights[users], size, iterations, rng)
            codes[users, k] = nearest(left[users], codebooks[k])
            left[users] -= codebooks[k][codes[users, k]]
        step()
    rounds = -(-iterations // _ROUND) * (_MORE_ROUNDS if m * size <= _FEW else 1)
    improved = _solved if m * size <= min(_MOST_SOLVED, len(points)) else _averaged
    for done in range(rounds):
        if done:
            codes = choose_sums(points, codebooks, hot, layout.hot_terms)
        codebooks = improved(points, weights, codes, codebooks)
    return codebooks.reshape(m * size, layout.width)


def choose_sums(
    rows: np.ndarray, codebooks: np.ndarray, hot: np.ndarray | None = None, hot_terms: int = 0
) -> np.ndarray:
    """Chooses codes int32 ``[n, m]`` of rows ``[n, D]`` in codebooks ``[m, K, D]``; not always the nearest.

    Rows that are not ``hot``, bool ``[n]``, have no codes, -1, in the last ``hot_terms`` codebooks.
    """
    if hot is None or not hot_terms:
        return search_sums(rows, codebooks)
    codes = np.full((len(rows), len(codebooks)), -1, np.int32)
    terms = len(codebooks) - hot_terms
    codes[~hot, :terms] = search_sums(rows[~hot], codebooks[:terms])
    codes[hot] = search_sums(rows[hot], codebooks)
    return codes


def _solved(
    points: np.ndarray, weights: np.ndarray, codes: np.ndarray, old: np.ndarray
) -> np.ndarray:
    """Solves for the codebooks with the smallest weighted squared error for given codes, all of them at once.

    Sums are the same if a vector is added to one codebook and subtracted from another, and rows of codebooks may have
    no points: what the points leave open stays near the old codebooks.
    """
    m, size, _ = old.shape
    present, codes = codes >= 0, np.maximum(codes, 0)
    moments = np.zeros((m * size, m * size))
    left = remainders(points, np.where(present, codes, -1), old)
    for a in range(m):
        for b in range(a, m):
            pairs = size * codes[:, a] + codes[:, b]
            both = weights * (present[:, a] & present[:, b])
            block = np.bincount(pairs, both, size * size).reshape(size, size)
            moments[a * size : (a + 1) * size, b * size : (b + 1) * size] = block
            moments[b * size : (b + 1) * size, a * size : (a + 1) * size] = block.T
    sums = sums_of(left, weights[:, None] * present, codes + size * np.arange(m), m * size)
    moments[np.diag_indices(m * size)] += 1e-2 * weights.sum() / size
    # The matrix is symmetric; its transpose is in the order of LAPACK, which need not copy it.
    triangle = scipy.linalg.cho_factor(moments.T, overwrite_a=True, check_finite=False)
    change = scipy.linalg.cho_solve(triangle, sums, check_finite=False)
    return old + change.reshape(old.shape).astype(np.float32)


def _averaged(
    points: np.ndarray, weights: np.ndarray, codes: np.ndarray, old: np.ndarray
) -> np.ndarray:
    """Improves codebooks for given codes, one after another."""
    left, codebooks = remainders(points, codes, old), old.copy()
    for k, codebook in enumerate(codebooks):
        here = codes[:, k] >= 0
        some, at = left[here], codes[here, k]
        some += codebook[at]
        codebook[:] = means(some, weights[here], at, codebook)
        left[here] = some - codebook[at]
    return codebooks


def _parts(rows: np.ndarray, count: int) -> list[np.ndarray]:
    return [np.ascontiguousarray(part) for part in np.split(rows, count, axis=1)]


def _principal(points: np.ndarray, weights: np.ndarray, parts: int) -> np.ndarray:
    """The principal directions, divided among the parts such that each has about the same product of variances."""
    moments = points.T @ (weights[:, None] * points)
    variances, directions = np.linalg.eigh(moments)
    room = len(variances) // parts
    groups: list[list[int]] = [[] for _ in range(parts)]
    logs = np.log(np.maximum(variances, 1e-12 * max(variances[-1], 1e-30)))
    logs -= logs.min()
    for k in np.argsort(-variances, kind="stable"):
        open_groups = [group for group in groups if len(group) < room]
        min(open_groups, key=lambda group: sum(logs[j] for j in group)).append(int(k))
    return directions.T[np.concatenate(groups)].astype(np.float32)
