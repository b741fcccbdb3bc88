"""`spectral_rows`: rows of contexts and ids that score interactions without training."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base.arguments import as_positive
from jax_tt._base.progress import Progress
from jax_tt.order._edges import Edges
from jax_tt.order._interactions import unit_rows
from jax_tt.order._spectral import context_vectors, item_vectors
from jax_tt.order._threads import one_blas_thread


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

    Memory is that of `from_interactions` with ``rank=features``, plus the result. Requires ``jax-tt[order]``.

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
        ImportError: scipy or threadpoolctl is missing.

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
    with one_blas_thread(name), Progress(progress, name, 2 * iterations + 1) as bar:
        vectors, values = item_vectors(edges, width, iterations, seed, bar)
        contexts = context_vectors(edges, vectors, values)
    contexts = unit_rows(contexts * np.sqrt(values).astype(np.float32))
    items = vectors * (edges.item_degrees[:, None] ** 0.25).astype(np.float32)
    items /= max(float(np.sqrt(np.square(items).sum() / ids)), np.finfo(np.float32).tiny)
    return _widened(contexts, width), _widened(items, width)


def _widened(rows: np.ndarray, width: int) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
