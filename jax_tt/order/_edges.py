"""Converts interactions in any of the accepted forms to an iterable of sparse matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import scipy

from jax_tt._base.arguments import as_array, expect, expect_ids, instance_of, mismatch, type_of

_CHUNK = 1 << 24  # interactions of one sparse matrix
_KEPT = 1 << 26  # interactions kept in memory; above this, the source is read again for every pass

# Every call gives pairs (contexts, items), both int64 [n].
Source = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]


class Edges:
    """Counts of interactions, a sparse matrix ``[contexts, items]`` given as a sum of sparse matrices.

    Attributes:
        contexts: number of rows, one more than the largest context.
        context_degrees, item_degrees: float64, number of interactions of each.
    """

    def __init__(self, interactions: Any, num_items: int):
        self.items = num_items
        self._kept: list[Any] | None = []
        if scipy.sparse.issparse(interactions):
            self._read_matrix(interactions)
        else:
            self._source = _source(interactions)
            self._read_source()

    def __iter__(self) -> Iterator[Any]:
        """float32 CSR matrices ``[contexts, items]``."""
        if self._kept is not None:
            yield from self._kept
            return
        for contexts, items in _rebatched(self._source()):
            yield self._matrix(contexts, items)

    def _matrix(self, contexts: np.ndarray, items: np.ndarray) -> Any:
        ones = np.ones(len(items), np.float32)
        shape = (self.contexts, self.items)
        return scipy.sparse.csr_matrix((ones, (contexts, items)), shape=shape)

    def _read_matrix(self, matrix: Any) -> None:
        if matrix.shape[1] != self.items:
            got = f"a sparse matrix of shape {matrix.shape}"
            expected = f"one column per row of the table, {self.items}"
            raise mismatch("interactions", got, expected, "Its transpose orders the other side.")
        matrix = matrix.tocsr().astype(np.float32)
        if not (np.isfinite(matrix.data).all() and (matrix.data >= 0).all()):
            got = "a sparse matrix with negative or non-finite entries"
            raise mismatch("interactions", got, "counts or weights of at least 0")
        self.contexts = matrix.shape[0]
        self.context_degrees = np.asarray(matrix.sum(axis=1, dtype=np.float64)).ravel()
        self.item_degrees = np.asarray(matrix.sum(axis=0, dtype=np.float64)).ravel()
        self._kept = [matrix]

    def _read_source(self) -> None:
        self.item_degrees = np.zeros(self.items)
        self.context_degrees = np.zeros(0)
        pairs, total = [], 0
        for contexts, items in _rebatched(self._source()):
            got = f"the context {contexts.min()}"
            expect(contexts.min() >= 0, "interactions", got, "integers of at least 0")
            expect_ids("interactions", items, self.items)
            self.item_degrees += np.bincount(items, minlength=self.items)
            degrees = np.bincount(contexts).astype(np.float64)
            if len(degrees) < len(self.context_degrees):
                degrees, self.context_degrees = self.context_degrees, degrees
            degrees[: len(self.context_degrees)] += self.context_degrees
            self.context_degrees = degrees
            total += len(items)
            pairs = [*pairs, (contexts, items)] if total <= _KEPT else []
        self.contexts = len(self.context_degrees)
        self._kept = [self._matrix(*pair) for pair in pairs] if total <= _KEPT else None


def _source(interactions: Any) -> Source:
    if callable(interactions):
        return lambda: map(_pairs, _chunks_of(interactions()))
    if isinstance(interactions, tuple) or hasattr(interactions, "shape"):
        whole = _pairs(interactions)
        return lambda: iter([whole])
    if isinstance(interactions, Iterator):
        raise TypeError(
            f"interactions: got {type_of(interactions)}, which can be read once only; several passes are made. "
            "Pass a function that returns a fresh iterator of chunks, e.g. lambda: read_chunks(path)."
        )
    return lambda: map(_pairs, _chunks_of(interactions))


def _chunks_of(chunks: Any) -> Iterable[Any]:
    expected = (
        "(contexts, ids), pairs [n, 2], a sparse matrix [contexts, ids], a list of chunks of pairs, or a function that "
        "returns an iterator of them"
    )
    instance_of("interactions", chunks, Iterable, expected)
    return chunks


def _pairs(chunk: Any) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(chunk, tuple):
        if len(chunk) != 2:
            raise mismatch("interactions", f"a tuple of {len(chunk)}", "(contexts [n], ids [n])")
        contexts, items = (np.asarray(as_array("interactions", part)) for part in chunk)
    else:
        pairs = np.asarray(as_array("interactions", chunk))
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            got = f"an array of shape {pairs.shape}"
            raise mismatch("interactions", got, "pairs [n, 2], or a tuple (contexts [n], ids [n])")
        contexts, items = pairs[:, 0], pairs[:, 1]
    if contexts.ndim != 1 or contexts.shape != items.shape:
        got = f"contexts of shape {contexts.shape} and ids of shape {items.shape}"
        raise mismatch("interactions", got, "both [n]")
    for name, part in (("contexts", contexts), ("ids", items)):
        if part.dtype.kind not in "iu" and part.size:
            raise TypeError(f"interactions: got {name} of {part.dtype}; expected integers.")
    return contexts, items


def _rebatched(
    pairs: Iterator[tuple[np.ndarray, np.ndarray]],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pairs in pieces of `_CHUNK`, since each piece costs time linear in the number of contexts per product."""
    waiting: list[tuple[np.ndarray, np.ndarray]] = []
    held = 0
    for contexts, items in pairs:
        for at in range(0, len(items), _CHUNK):
            piece = contexts[at : at + _CHUNK], items[at : at + _CHUNK]
            if held + len(piece[1]) > _CHUNK:
                yield _joined(waiting)
                waiting, held = [], 0
            waiting.append(piece)
            held += len(piece[1])
    if held:
        yield _joined(waiting)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    contexts, items = zip(*parts, strict=True)
    return np.concatenate(contexts).astype(np.int64), np.concatenate(items).astype(np.int64)
