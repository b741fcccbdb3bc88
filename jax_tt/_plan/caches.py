"""Row caches from samples of ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jax_tt._cache.config import RowCache
from jax_tt._cache.miss_ratio import miss_ratio_curve, stream

# A cache whose rows take a smaller share of the lookups, or not so many times their share of the rows, is not worth it.
_LEAST_HITS, _LEAST_SKEW = 0.2, 2
_REFRESH = 100
_SLOT, _COUNTER, _COUNTERS = (
    12,
    16,
    16,
)  # bytes of a slot's directory, of a counter; counters of a slot


class Demand(NamedTuple):
    """What a sample of ids asks for.

    Attributes:
        ids: the sample without padding.
        rows: cache at the knee of the miss ratio, 0 for none.
        nbytes: of such a cache.
    """

    ids: np.ndarray
    rows: int
    nbytes: int


def demand(name: str, sample: Any, num_embeddings: int, features: int, itemsize: int) -> Demand:
    """The knee of the miss ratio over the size, the point farthest below the chord.

    Beyond it one more per cent of the rows asked for takes less than one more per cent of the lookups.
    """
    try:
        ids = stream(sample)
    except TypeError as error:
        raise TypeError(f"id_samples[{name!r}]: {error}") from error
    if ids.size < 2 or ids.max() >= num_embeddings:
        got = "fewer than two ids" if ids.size < 2 else f"the id {ids.max()}"
        raise ValueError(
            f"id_samples[{name!r}]: got {got}; expected a sample of ids in [0, {num_embeddings})."
        )
    curve = miss_ratio_curve(ids, policy="ideal")
    below = 1 - curve.sizes / curve.distinct - curve.miss_ratios
    rows = int(curve.sizes[int(np.argmax(below))])
    first, second = np.array_split(ids, 2)
    hits = _hits(first, second, rows)
    if hits < max(_LEAST_HITS, _LEAST_SKEW * rows / num_embeddings):
        rows = 0
    return Demand(ids, rows, rows * (features * itemsize + _SLOT + _COUNTER * _COUNTERS))


def cache_within(
    wanted: Demand, budget: int, features: int, dtype: Any
) -> tuple[RowCache | None, int]:
    """A cache of at most ``budget`` bytes and at most the knee's, and what it takes."""
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
    itemsize = np.dtype(dtype).itemsize
    taken = cache.capacity * (features * itemsize + _SLOT) + _COUNTER * (cache.counters or 0)
    return cache, taken


def hits_of(wanted: Demand, rows: int) -> float:
    """Share of the lookups of the second half that the first half's favourites take."""
    return _hits(*np.array_split(wanted.ids, 2), rows)


def _hits(first: np.ndarray, second: np.ndarray, rows: int) -> float:
    ids, counts = np.unique(first, return_counts=True)
    favourites = ids[np.argsort(-counts, kind="stable")[:rows]]
    return float(np.isin(second, favourites).mean())
