"""Leading singular vectors of the degree-normalised matrix of interactions, and `spectral_rows` made of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_tt._base.arguments import as_positive
from jax_tt._base.progress import Progress
from jax_tt._base.threads import one_blas_thread
from jax_tt.order._edges import Edges

_OVERSAMPLING = 8


def spectral_rows(
    interactions: Any,
    num_embeddings: int,
    features: int,
    *,
    iterations: int = 4,
    seed: int = 0,
    progress: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of contexts and ids whose inner products are large for pairs that interact, as initial values for training.

    They are the leading singular vectors of the interactions, normalised by the square roots of the degrees of contexts
    and ids, as in `from_interactions`. Those of an id are scaled by the fourth root of its degree, so that frequent ids
    get higher scores than rare ones; those of a context by the square roots of the singular values, and to norm 1.
    Order the rows with `from_table` and compress them with `tt.from_dense` to get initial cores.

    Memory is that of `from_interactions` with ``rank=features``, plus the result.

    Args:
        interactions: as for `from_interactions`; contexts are integers from 0.
        num_embeddings: number of ids, N.
        features: number of columns, D.
        iterations: number of subspace iterations.
        seed: of the randomised iteration.
        progress: show a progress bar if it takes longer than a second.

    Returns:
        float32 ``[contexts, D]``, one row for every context up to the largest, and float32 ``[N, D]``. Rows of contexts
        have norm 1, and those of ids a mean squared norm of 1; scale them to suit the loss. Rows without interactions
        are 0, and so are columns beyond the number of contexts or ids.

    Raises:
        ValueError: an id is at least ``num_embeddings``, or an array has the wrong shape.
        TypeError: ids are not integers, or the stream can be read only once.

    Example:
        >>> import jax_tt, numpy as np
        >>> users, items = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 0, 1, 2, 3])
        >>> user_rows, item_rows = jax_tt.order.spectral_rows((users, items), 4, features=2)
        >>> scores = user_rows @ item_rows.T
        >>> bool(scores[0, :2].min() > scores[0, 2:].max()), bool(scores[2, 2:].min() > scores[2, :2].max())
        (True, True)
    """
    ids, width = as_positive("num_embeddings", num_embeddings), as_positive("features", features)
    iterations = as_positive("iterations", iterations)
    edges = Edges(interactions, ids)
    if not edges.contexts:
        return np.zeros((0, width), np.float32), np.zeros((ids, width), np.float32)
    name = "order.spectral_rows"
    with one_blas_thread(), Progress(progress, name, 2 * iterations + 1) as bar:
        vectors, values = item_vectors(edges, width, iterations, seed, bar)
        contexts = context_vectors(edges, vectors, values)
    contexts = unit_rows(contexts * np.sqrt(values).astype(np.float32))
    items = vectors * (edges.item_degrees[:, None] ** 0.25).astype(np.float32)
    items /= max(float(np.sqrt(np.square(items).sum() / ids)), np.finfo(np.float32).tiny)
    return _widened(contexts, width), _widened(items, width)


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


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


def unit_rows(points: np.ndarray) -> np.ndarray:
    """Points scaled to norm 1: the norm depends on the frequency of an id, and only its direction matters."""
    length = np.linalg.norm(points, axis=1, keepdims=True)
    points /= np.maximum(length, np.finfo(np.float32).tiny)
    return points


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
