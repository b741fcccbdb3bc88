"""Row caches from samples of ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jax_tt._base.arguments import expect, expect_ids
from jax_tt._directories.miss_ratio import miss_ratio_curve, stream
from jax_tt._directories.row_cache import RowCache, entry_bytes

# A cache whose rows take a smaller share of the lookups, or not so many times their share of the rows, is not worth it.
_LEAST_HITS, _LEAST_SKEW = 0.2, 2
_REFRESH = 100
_COUNTERS = 16  # of a slot


class Demand(NamedTuple):
    """The requests in a sample of ids.

    Attributes:
        ids: the sample without padding.
        num_embeddings: of the table.
        rows: cache at the knee of the miss ratio.
        nbytes: of such a cache.
    """

    ids: np.ndarray
    num_embeddings: int
    rows: int
    nbytes: int


def demand(name: str, sample: Any, num_embeddings: int, features: int, dtype: Any) -> Demand:
    """The knee of the miss ratio over the size, the point farthest below the chord.

    Beyond it one more per cent of the distinct ids covers less than one more per cent of the lookups.
    """
    try:
        ids = stream(sample)
    except TypeError as error:
        raise TypeError(f"id_samples[{name!r}]: {error}") from error
    label = f"id_samples[{name!r}]"
    expect(ids.size > 1, label, "fewer than two ids", "a sample of the ids that are requested")
    expect_ids(label, ids, num_embeddings)
    curve = miss_ratio_curve(ids, policy="ideal")
    below = 1 - curve.sizes / curve.distinct - curve.miss_ratios
    rows = int(curve.sizes[int(np.argmax(below))])
    slot, counter = entry_bytes(int(ids.max()), features, dtype, None)
    return Demand(ids, num_embeddings, rows, rows * (slot + counter * _COUNTERS))


def cache_within(
    wanted: Demand, budget: int, features: int, dtype: Any
) -> tuple[RowCache | None, int]:
    """A cache of at most ``budget`` bytes and at most the knee's, and what it takes; None if it is not worth it."""
    try:
        cache = RowCache.suggest(
            wanted.ids,
            min(budget, wanted.nbytes),
            features=features,
            dtype=dtype,
            refresh_every=_REFRESH,
        )
    except ValueError:
        return None, 0  # not even one row fits
    least = max(_LEAST_HITS, _LEAST_SKEW * cache.capacity / wanted.num_embeddings)
    if hits_of(wanted, cache.capacity) < least:
        return None, 0
    slot, counter = entry_bytes(int(wanted.ids.max()), features, dtype, None)
    return cache, slot * cache.capacity + counter * (cache.counters or 0)


def hits_of(wanted: Demand, rows: int) -> float:
    """Share of the lookups of the sample's second half that the most frequent rows of its first half take."""
    first, second = np.array_split(wanted.ids, 2)
    ids, counts = np.unique(first, return_counts=True)
    favourites = ids[np.argsort(-counts, kind="stable")[:rows]]
    return float(np.isin(second, favourites).mean())
