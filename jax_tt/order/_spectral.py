"""Leading singular vectors of the degree-normalised matrix of interactions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_tt._base.progress import Progress
from jax_tt.order._edges import Edges

_OVERSAMPLING = 8


def item_vectors(
    edges: Edges, rank: int, iterations: int, seed: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """Right singular vectors of ``D_c^-1/2 A D_i^-1/2`` by randomised subspace iteration.

    Halko, Martinsson and Tropp, "Finding structure with randomness", 2011, algorithm 4.4, applied to the items.

    Returns:
        float32 ``[items, r]`` with ``r <= rank``, and the singular values ``[r]``, largest first.
    """
    rng = np.random.default_rng(seed)
    width = min(rank + _OVERSAMPLING, edges.items, edges.contexts)
    scale_c, scale_i = map(_inverse_root, (edges.context_degrees, edges.item_degrees))
    basis = rng.standard_normal((edges.items, width), np.float32) * (scale_i > 0)[:, None]
    for _ in range(iterations):
        basis = _orthonormal(basis)
        seen = _product(edges, basis, scale_i, scale_c)
        progress.step()
        basis = _product((matrix.T for matrix in edges), seen, scale_c, scale_i)
        progress.step()
    basis = _orthonormal(basis)
    image = _product(edges, basis, scale_i, scale_c)
    progress.step()
    values, turn = np.linalg.eigh(np.matmul(image.T, image).astype(np.float64))
    kept = slice(None, -min(rank, width) - 1, -1)
    return basis @ turn[:, kept].astype(np.float32), np.sqrt(np.maximum(values[kept], 0))


def context_vectors(edges: Edges, vectors: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Left singular vectors float32 ``[contexts, r]`` for the right ones; 0 for vanishing singular values."""
    scale_c, scale_i = map(_inverse_root, (edges.context_degrees, edges.item_degrees))
    kept = values > 1e-6 * max(values.max(initial=0), np.finfo(np.float32).tiny)
    inverse = np.where(kept, 1 / np.where(kept, values, 1), 0).astype(np.float32)
    return _product(edges, vectors, scale_i, scale_c) * inverse


def _product(
    matrices: Iterable[Any], vectors: np.ndarray, scale_in: np.ndarray, scale_out: np.ndarray
) -> np.ndarray:
    """The sum of the matrices times the vectors, scaled before and after."""
    scaled = vectors * scale_in[:, None]
    result = np.zeros((len(scale_out), vectors.shape[1]), np.float32)
    for matrix in matrices:
        result += matrix @ scaled
    result *= scale_out[:, None]
    return result


def _orthonormal(basis: np.ndarray) -> np.ndarray:
    """Orthonormalises the columns by the inverse root of their Gram matrix; vanishing directions become 0.

    The columns are images of orthonormal ones, so the Gram matrix of the relevant directions is well conditioned.
    """
    values, vectors = np.linalg.eigh(np.matmul(basis.T, basis).astype(np.float64))
    kept = values > 1e-9 * max(values[-1], 0)
    scale = np.where(kept, 1 / np.sqrt(np.where(kept, values, 1)), 0)
    return basis @ (vectors * scale).astype(np.float32)


def _inverse_root(degrees: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.where(degrees > 0, 1 / np.sqrt(degrees), 0).astype(np.float32)
