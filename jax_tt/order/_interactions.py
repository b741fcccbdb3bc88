"""`from_counts` and `from_interactions`: orders by how often ids are requested, and with which others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_tt._base.arguments import as_array, as_positive, expect
from jax_tt._base.progress import Progress
from jax_tt._base.threads import one_blas_thread
from jax_tt._ids.id_order import IdOrder, order_of_rows
from jax_tt._tt.shape import TTShape
from jax_tt.order._edges import Edges
from jax_tt.order._partition import as_shape, partition, rounds
from jax_tt.order._spectral import item_vectors, unit_rows


def from_counts(counts: Any) -> IdOrder:
    """The most frequent ids in the first rows.

    The rows of a prefix are adjacent, so frequent ids share prefixes, whose products are computed once per batch and
    stay in the processor's caches. This makes lookups faster, but does not make neighbours similar.

    Args:
        counts: ``[N]`` numbers of at least 0, the number of requests of each id.

    Returns:
        `IdOrder`. Ids with equal counts, including those without requests, stay in increasing order.

    Raises:
        ValueError: ``counts`` is empty, not one-dimensional, negative or not finite.

    Example:
        >>> import jax_tt
        >>> jax_tt.order.from_counts([3, 0, 9, 3]).rows
        array([1, 3, 0, 2], dtype=uint16)
    """
    counts = np.asarray(as_array("counts", counts))
    expect(counts.ndim == 1 and counts.size, "counts", counts, "[N] with N >= 1")
    counts = counts.astype(np.float64)
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError("counts: got negative or non-finite values; expected numbers >= 0.")
    return order_of_rows(np.argsort(-counts, kind="stable"))


def from_interactions(
    interactions: Any,
    shape: TTShape,
    *,
    rank: int = 32,
    iterations: int = 4,
    reuse: float = 0.0,
    seed: int = 0,
    progress: bool = True,
) -> IdOrder:
    """An order in which ids that occur in the same contexts share leading digits.

    A context is anything that groups ids: a user, a session, a document. The leading singular vectors of the matrix of
    interactions, normalised by the square roots of the degrees of contexts and ids, place every id in space, close to
    its contexts (Dhillon, "Co-clustering documents and words using bipartite spectral graph partitioning", 2001). The
    ids are then divided into ``p_1`` equal parts, each of these into ``p_2``, and so on, always along the longest
    direction of a part.

    Memory is linear in contexts and ids, three times ``4 (rank + 8)`` bytes for each, plus at most 2**26 interactions;
    a longer stream is read once per pass, ``2 iterations + 2`` times.

    Args:
        interactions: ``(contexts [n], ids [n])``, pairs ``[n, 2]``, or a sparse matrix ``[contexts, N]`` of counts; or
            a list of chunks of pairs, or a function that returns an iterator of chunks. Contexts are integers that
            should start near 0, because the largest one determines the memory. A pair that occurs twice counts twice.
        shape: `TTShape` of the table.
        rank: number of singular vectors, about as many as groups that the first digit should distinguish.
        iterations: number of subspace iterations.
        reuse: weight of frequency relative to co-occurrence. With 0 only co-occurrence counts. Larger values give
            similarly frequent ids the same prefixes, as with `from_counts`, which improves speed and reduces quality.
        seed: of the randomised iteration. The same seed and library versions give the same order, for any number of
            cores.
        progress: show a progress bar if it takes longer than a second.

    Returns:
        `IdOrder`. Ids without interactions get the last rows, in increasing order.

    Raises:
        ValueError: an id is outside the table, or an array has the wrong shape.
        TypeError: ids are not integers, or the stream can be read only once.

    Example:
        >>> import jax_tt, numpy as np
        >>> rng = np.random.default_rng(0)
        >>> users, kind = rng.integers(0, 300, 6000), rng.integers(0, 40, 6000)
        >>> items = kind * 3 + users % 3  # three groups of 40 items, scattered
        >>> order = jax_tt.order.from_interactions((users, items), jax_tt.TTShape(120, 8, 4, (3, 40), (2, 4)))
        >>> digits = order.apply(np.arange(120)) // 40
        >>> [len(set(digits[group::3])) for group in range(3)]
        [1, 1, 1]
    """
    shape = as_shape(shape)
    rank, iterations = as_positive("rank", rank), as_positive("iterations", iterations)
    if not isinstance(reuse, int | float) or not 0 <= reuse < math.inf:
        raise ValueError(f"reuse: got {reuse!r}; expected a finite number of at least 0.")
    edges = Edges(interactions, shape.num_embeddings)
    seen = np.flatnonzero(edges.item_degrees > 0)
    unseen = np.flatnonzero(edges.item_degrees == 0)
    steps = 2 * iterations + 1 + rounds(len(seen), shape.row_factors)
    name = "order.from_interactions"
    with one_blas_thread(), Progress(progress, name, steps) as bar:
        points = np.zeros((0, 1), np.float32)
        if len(seen):
            vectors, values = item_vectors(edges, rank, iterations, seed, bar)
            points = unit_rows((vectors * (values**2).astype(np.float32))[seen])
            del vectors
        if reuse and len(seen):
            points = _with_frequency(points, edges.item_degrees[seen], reuse)
        order = partition(points, shape.row_factors, bar)
    return order_of_rows(np.concatenate([seen[order], unseen]))


def _with_frequency(points: np.ndarray, degrees: np.ndarray, reuse: float) -> np.ndarray:
    """Adds a coordinate: the rank by frequency, in units of the spread of the points."""
    place = np.empty(len(degrees))
    place[np.argsort(-degrees, kind="stable")] = np.linspace(-1, 1, len(degrees))
    spread = math.sqrt(float(points.var(axis=0).sum()))
    return np.column_stack([points, (reuse * spread * place).astype(np.float32)])
