"""The best rows of a table for queries: what every kind does, a block of rows at a time, unless it registers a scan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._ids.id_space import Slots
from jax_tt._jax import backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._lookup.rows import lookup_rows
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import Table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries for the best rows of a table, with constants for arrays.

    Attributes:
        vectors: ``[B, D]`` in the accumulator type of the table.
        exclude: ids int32 ``[B, E]`` of rows that a query leaves out; those out of range have no effect. Tables of
            keys have digits ``[B, E, 3]``.
        present: bool ``[N]``, the rows that exist; None for all.
        k: the number of rows for each query.
        block: the number of rows that are scored together.
        recall_target: None for the best rows; the expected share of them that `jax.lax.approx_max_k` finds.
        method: of the lookups, or of what a kind registers.
    """

    vectors: jax.Array
    exclude: jax.Array
    present: jax.Array | None
    k: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    recall_target: float | None = dataclasses.field(metadata={"static": True})
    method: str = dataclasses.field(metadata={"static": True})


@functools.singledispatch
def best_rows(table: Table, state: State, queries: Queries) -> tuple[jax.Array, Any]:
    """Scores ``[B, k]`` and ids ``[B, k]`` of the rows with the largest inner products, in descending order.

    Ids are in ascending order among equal scores, so that the result is unique. Scores that are NaN or -inf are those
    of no row. Where there are no more rows, scores are -inf and ids -1. Kinds with a native scan register it.
    """
    return best_in_blocks(table, state, queries)


def best_in_blocks(table: Table, state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
    """`best_rows` from lookups of blocks of ids, which every kind has."""
    like = accumulator(table.spec.storage(state))
    options = Lookup(
        bounds="clip", dtype=like, precision="highest", method=queries.method, train=False
    )

    def rows_at(ids: jax.Array) -> jax.Array:
        # The state depends on the block, so that what is made of it for one is not made of all rows ahead of the loop.
        held, ids = lax.optimization_barrier((state, ids))
        return lookup_rows(table, held, Slots(ids) if table.ids.takes_slots else ids, options)[0]

    return best_of_blocks(queries, table.num_embeddings, rows_at)


def best_of_blocks(
    queries: Queries, count: int, rows_at: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The best of ``count`` rows, of which ``rows_at`` returns those of ids ``[n]``, ``[n, D]``."""
    size = min(queries.block, count)
    shape = (queries.vectors.shape[0], queries.k)
    like = queries.vectors.dtype

    def next_block(k: Any, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = jnp.asarray(k, jnp.int32) * size
        ids = jnp.minimum(start + lax.iota(jnp.int32, size), count - 1)
        # The ids of the last block that are beyond the table are its last one, again.
        here = ids == start + lax.iota(jnp.int32, size)
        if queries.present is not None:
            here &= queries.present[ids]
        scores = jnp.einsum(
            "bd,nd->bn", queries.vectors, rows_at(ids), precision=lax.Precision.HIGHEST
        )
        # Zeros are made equal, since top_k orders their signs; NaN compares false.
        scores = jnp.where(scores == 0, 0, scores)
        scores = jnp.where(here[None] & (scores > -jnp.inf), scores, -jnp.inf)
        scores = _without(scores, queries.exclude - start)
        scores, places = _largest(scores, min(queries.k, size), queries.recall_target)
        return merged(best, (scores, jnp.where(scores > -jnp.inf, start + places, -1)), queries.k)

    best = jnp.full(shape, -jnp.inf, like), jnp.full(shape, -1, jnp.int32)
    best = vary_over(best, varying_axes(queries, jax.eval_shape(rows_at, jnp.zeros(1, jnp.int32))))
    return lax.fori_loop(0, -(-count // size), next_block, best)


def merged(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array], k: int
) -> tuple[jax.Array, jax.Array]:
    """The best k of two lists of scores and ids for each query; of equal scores, those of ``first`` come first."""
    scores, ids = (jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True))
    scores, places = lax.top_k(scores, k)
    return scores, jnp.take_along_axis(ids, places, axis=1)


def _without(scores: jax.Array, columns: jax.Array) -> jax.Array:
    """The scores with -inf at ``columns[B, E]``; those out of range have no effect."""
    if not columns.shape[1]:
        return scores
    columns = jnp.where(columns < 0, scores.shape[1], columns)
    rows = lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    return scores.at[rows, columns].set(-jnp.inf, mode="drop", wrap_negative_indices=False)


def _largest(scores: jax.Array, k: int, recall_target: float | None) -> tuple[jax.Array, jax.Array]:
    if recall_target is None:
        return lax.top_k(scores, k)
    found, places = lax.approx_max_k(scores, k, recall_target=recall_target)
    return found, places.astype(jnp.int32)


def in_order(scores: jax.Array, words: Sequence[jax.Array], k: int) -> list[jax.Array]:
    """The best k of scores ``[B, n]``, and their words, arrays ``[B, n]`` whose first one orders equal scores first."""
    negated, *words = lax.sort([-scores, *words], num_keys=1 + len(words))
    return [-negated[:, :k], *(word[:, :k] for word in words)]


def best_scanned(
    table: Table,
    state: State,
    queries: Queries,
    scan: Callable[[State, Queries], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """``scan(state, queries)`` in programs for the CPU, where the method of the queries allows it; else blocks."""
    storage = table.spec.storage(state)
    if queries.recall_target is not None or storage == jnp.float64:
        return best_in_blocks(table, state, queries)
    in_blocks = functools.partial(best_in_blocks, table)

    def native(platform: str, *args: Any) -> tuple[jax.Array, jax.Array]:
        return scan(*args) if platform == "cpu" else in_blocks(*args)

    method = backend.choose(queries.method, storage)
    return backend.run(method, native, in_blocks, state, queries)
