"""Filling a cache with the frequent rows of a sample of ids, instead of counting in training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import concrete, expect, expect_ids, mismatch
from jax_tt._base.words import set_of
from jax_tt._directories.cache_directory import CacheDirectory, init_directory
from jax_tt._directories.cache_reference import rank_within
from jax_tt._directories.miss_ratio import stream
from jax_tt._directories.scores import MOST_COUNTED, UNIT
from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._kinds.cached.maintain import populated
from jax_tt._kinds.cached.table import cache_directory_of, cached_part, named_cache_directory
from jax_tt._table.check import check_state
from jax_tt._table.state import State
from jax_tt._table.table import Table

_MOST_SCORE = 2**31 - 1


def fill(
    table: Table, state: State, ids: Any, weights: Any = None, method: str = "auto"
) -> dict[str, Any]:
    """Puts the most frequent rows of a sample of ids into the cache.

    Every set gets its most frequent rows, ties by the smaller id, as far as it has room. All earlier counts are
    forgotten: rows that are cached already and are as frequent stay, with their values bit for bit, as do rows that no
    row of the sample displaces. Rows that leave are written back as in `populate`. The counts of the sample become the
    scores of the cached rows, from which counting goes on. It runs on the host, outside of ``jit``.

    Args:
        table: a table with a row cache.
        state: its arrays by name. Call this outside of a loss: the cores may change.
        ids: a sample of requested ids, integers of any shape; negative ids are ignored.
        weights: what each id counts, positive numbers of a shape that broadcasts to the ids; default 1.
        method: as in `Lookup`.

    Returns:
        The state with these rows in the cache.

    Raises:
        ValueError, TypeError: the table has no row cache, the state is not one of this table, the sample has no ids,
            ids that are not integers or not in the table, or the weights do not fit.

    >>> import jax, jax_tt
    >>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=jax_tt.RowCache(2, ways=2))
    >>> state = jax_tt.cache.fill(table, table.init(jax.random.key(0)), [7, 9, 8, 9, 8])
    >>> state["cache_tags"].tolist()
    [[8, 9]]
    """
    cached = cached_part(table)
    check_state(cached, state)
    if ID_ORDER in state:
        ids = IdOrder(state[ID_ORDER]).apply(ids)
    before = cache_directory_of(state)
    concrete("table", before.tags, "A cache is filled outside of jit.")
    rows, counts = _frequencies(cached.num_embeddings, ids, weights)
    scoring = cached.cache.scoring
    unit = UNIT if scoring.policy == "lfu" and scoring.half_life is not None else 1
    # As if the rows were requested so often just now.
    scores = np.clip(np.rint(counts * unit), 1, _MOST_SCORE).astype(np.int32)
    sampled = _candidates(before, rows, scores)
    after = cache_directory_of(
        state := populated(cached, {**state, **named_cache_directory(sampled)}, method)
    )
    scores = after.scores
    if cached.cache.policy == "lru":  # as if requested in one step, the last
        scores = jnp.minimum(scores, MOST_COUNTED)
    sizes: tuple[Any, ...] = (*before.tags.shape, *before.ghost_tags.shape, before.tags.dtype)
    ghosts = {
        name: value
        for name, value in init_directory(*sizes)._asdict().items()
        if name.startswith("ghost_")
    }
    return {**state, **named_cache_directory(after._replace(scores=scores, **ghosts))}


def _frequencies(num_embeddings: int, ids: Any, weights: Any) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of a sample, ascending, and how often it has them, float64."""
    array = np.asarray(ids)
    kept = stream(array)
    expect(kept.size, "ids", "none", "a sample of the ids that the table is asked for")
    expect_ids("ids", kept, num_embeddings)
    each = np.ones(())
    if weights is not None:
        each = np.asarray(weights, np.float64)
        if not np.all((each > 0) & np.isfinite(each)):
            raise mismatch("weights", "one that is not positive and finite", "positive numbers")
    try:
        each = np.broadcast_to(each, array.shape).reshape(-1)[array.reshape(-1) >= 0]
    except ValueError:
        raise ValueError(
            f"weights: got shape {each.shape} for ids of shape {array.shape}; expected one that broadcasts to it."
        ) from None
    rows, places = np.unique(kept, return_inverse=True)
    return rows, np.bincount(places, each)


def _candidates(directory: CacheDirectory, rows: np.ndarray, scores: np.ndarray) -> CacheDirectory:
    """The directory with the scores of a sample, whose rows are ghosts; populating it moves the best into the cache."""
    sets, ways = directory.tags.shape
    tags = np.asarray(directory.tags)
    place = np.minimum(np.searchsorted(rows, tags), rows.size - 1)
    here = rows[place] == tags
    new = ~np.isin(rows, tags)
    ids, values = jnp.asarray(rows[new], tags.dtype), jnp.asarray(scores[new])
    home = set_of(ids, sets)
    rank = rank_within(home, sets, -values, ids)
    at = jnp.where(rank < ways, home * ways + rank, sets * ways)

    def ghosts(fill: int, values: jax.Array) -> jax.Array:
        empty = jnp.full(sets * ways, fill, values.dtype)
        return empty.at[at].set(values, mode="drop").reshape(sets, ways)

    # Not the step of the clock, in which no row would be evicted.
    touched = jnp.full((sets, ways), directory.clock - 1, jnp.int32)
    return directory._replace(
        scores=jnp.asarray(np.where(here, scores[place], 0), jnp.int32),
        touched=touched,
        ghost_tags=ghosts(-1, ids),
        ghost_scores=ghosts(0, values),
        ghost_touched=touched,
        ghost_recent=jnp.zeros((sets, ways), jnp.int32),
        refreshed=jnp.copy(directory.clock),
        unaged=jnp.zeros_like(directory.unaged),
    )
