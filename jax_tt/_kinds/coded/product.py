"""Product codes: fits codebooks for each part of the columns, and chooses codes in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._kinds.coded import additive
from jax_tt._kinds.coded.clusters import kmeans, means, nearest
from jax_tt._kinds.coded.layout import CodeLayout


def fitted(
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
            else additive.fitted(layout, part, weights, hot, iterations, rng, step)
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


def nearest_codes(rows: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    """Chooses codes int32 ``[n, parts * terms]`` of rows ``[n, D]`` in codebooks ``[parts, terms, K, D / parts]``."""
    parts = zip(_parts(rows, len(codebooks)), codebooks, strict=True)
    return np.concatenate([additive.nearest_codes(*part) for part in parts], axis=1)


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
