"""Miss ratio against cache size, from a stream of ids; on the host, in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_tt._arguments import one_of

POLICIES = ("lru", "ideal")
_POINTS = 64  # of a curve whose sizes were not given


@dataclasses.dataclass(frozen=True)
class MissRatioCurve:
    """Share of requests that a cache of each size misses; made by `miss_ratio_curve`.

    Attributes:
        policy: ``"lru"`` or ``"ideal"``.
        sizes: rows of the cache, int64 ``[n]``, ascending.
        miss_ratios: float64 ``[n]``.
        requests: ids of the stream.
        distinct: different ids among them; with a sample, an estimate.

    >>> import jax_tt
    >>> curve = jax_tt.miss_ratio_curve([7, 7, 7, 8], [1, 2], policy="ideal")
    >>> curve.miss_ratios.tolist(), curve.distinct
    ([0.25, 0.0], 2)
    """

    policy: str
    sizes: np.ndarray
    miss_ratios: np.ndarray
    requests: int
    distinct: int

    def plot(self, ax: Any = None, **style: Any) -> Any:
        """Draws the curve with matplotlib, over the logarithm of the size.

        Args:
            ax: axes to draw on; default those of the current figure.
            **style: of ``ax.plot``.

        Returns:
            The axes.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise ImportError(
                    "MissRatioCurve.plot needs matplotlib: pip install matplotlib."
                ) from error
            ax = plt.gca()
        ax.plot(self.sizes, self.miss_ratios, **{"label": self.policy, **style})
        ax.set(xscale="log", xlabel="rows in the cache", ylabel="miss ratio", ylim=(0, 1.02))
        return ax


def miss_ratio_curve(
    ids: Any, sizes: Any = None, policy: str = "lru", *, sample: float = 1.0
) -> MissRatioCurve:
    """Miss ratio of caches of many sizes on a stream of ids, computed at once.

    ``"lru"`` is exact for a fully associative cache that starts empty and lets every id in at once: the stack
    distance of each request is counted in O(log n). ``"ideal"`` is what the best fixed set of rows reaches, those asked
    for most often in the stream, and so a bound for LFU on a stream whose favourites stay the same.

    Args:
        ids: integers of any shape, in the order of the requests; negative ones (padding) are left out.
        sizes: rows of the caches; default 64 sizes up to the number of distinct ids, evenly spaced by ratio.
        policy: ``"lru"`` or ``"ideal"``.
        sample: share of the *ids* to follow, chosen by their hash; distances are scaled up (SHARDS). For long
            streams: at 0.01, sizes of at least some thousand rows come out within a point or so.

    Returns:
        `MissRatioCurve`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    >>> import jax_tt
    >>> jax_tt.miss_ratio_curve([1, 2, 1, 3, 1, 2], sizes=[1, 2, 3]).miss_ratios.round(2).tolist()
    [1.0, 0.67, 0.5]
    """
    one_of("policy", policy, POLICIES)
    ids = stream(ids)
    if not isinstance(sample, int | float) or not 0 < sample <= 1:
        raise ValueError(f"sample: got {sample!r}; expected a number above 0, at most 1.")
    requests = ids.size
    if sample < 1:
        # 53 bits of the hash against the share, as exact as the float is.
        ids = ids[(_hash(ids) >> np.uint64(11)) < np.uint64(round(sample * 2**53))]
    counts = np.unique(ids, return_counts=True)[1]
    distinct = counts.size if sample == 1 else round(counts.size / sample)
    sizes = _sizes(sizes, distinct)
    # hit_at[k]: requests that are hits from size k + 1 on.
    hit_at = np.bincount(_stack_distances(ids)) if policy == "lru" else np.sort(counts)[::-1]
    hits = np.concatenate([[0], np.cumsum(hit_at)])[
        np.minimum(np.floor(sizes * sample).astype(np.int64), hit_at.size)
    ]
    # A hash that drew too few or too many hot ids is made up for as if they were all hits.
    expected = requests * sample
    hits = np.clip(hits + (expected - ids.size), 0, expected)
    ratios = 1 - hits / expected if requests else np.ones(sizes.size)
    return MissRatioCurve(policy, sizes, ratios, requests, distinct)


def stream(ids: Any) -> np.ndarray:
    """Ids as one int64 vector without the negative ones."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids: got {array.dtype}; expected integers.")
    array = array.reshape(-1).astype(np.int64)
    return array[array >= 0]


def _sizes(sizes: Any, distinct: int) -> np.ndarray:
    if sizes is None:
        return np.unique(np.geomspace(1, max(distinct, 1), _POINTS).round().astype(np.int64))
    array = np.asarray(sizes)
    if array.dtype.kind not in "iu" or array.ndim != 1 or array.size == 0 or array.min() < 1:
        raise ValueError(
            f"sizes: got {sizes!r}; expected integers of at least 1, in one dimension."
        )
    return np.unique(array.astype(np.int64))


def _stack_distances(ids: np.ndarray) -> np.ndarray:
    """For every request but the first of its id, how many other ids were asked for since the last one.

    With p the place of the last request of the id of request t, these are the requests between p and t that are the
    first of their id after p: ``#{j < t: last[j] < p} - (p + 1)``, since all of 0..p have theirs before p.
    """
    n = ids.size
    kind = np.int32 if n < 2**31 else np.int64
    order = np.argsort(ids, kind="stable").astype(kind)
    again = ids[order[1:]] == ids[order[:-1]]
    last = np.full(n, -1, kind)
    last[order[1:][again]] = order[:-1][again]
    repeat = last >= 0
    # Ranks of `last`, a permutation: first requests, which have none, come before all others.
    has_next = np.zeros(n, bool)
    has_next[last[repeat]] = True
    rank = np.cumsum(~repeat, dtype=kind) - 1
    firsts = n - int(repeat.sum())
    rank[repeat] = firsts + (np.cumsum(has_next, dtype=kind) - 1)[last[repeat]]
    before = _smaller_before(rank)
    return before[repeat] - (last[repeat] + 1)


def _smaller_before(rank: np.ndarray) -> np.ndarray:
    """For each element of a permutation, how many smaller ones stand before it.

    Two elements differ first in one of their bits. Bit by bit from the top, elements equal above it lie together in
    their old order, at the places that their values will fill; one with the bit set counts those without it before it.
    """
    n, kind = rank.size, rank.dtype.type
    position = np.arange(n, dtype=kind)
    values, smaller = rank.copy(), np.zeros_like(rank)
    other_values, other_smaller = np.empty_like(rank), np.empty_like(rank)
    # Arithmetic in place instead of masks: three times as fast.
    for bit in reversed(range(max(n - 1, 0).bit_length())):
        to = values >> (bit + 1)
        to <<= bit + 1  # where the group starts
        high = values >> bit
        high &= 1
        highs = np.cumsum(high, dtype=kind)
        highs -= high
        highs -= highs[to]  # of the group, before each element
        lows = position - to
        lows -= highs
        # Lows keep their order from the start of the group on, highs theirs from half a group on.
        to += lows
        highs -= lows
        highs += kind(1 << bit)
        highs *= high
        to += highs
        lows *= high
        smaller += lows
        other_values[to], other_smaller[to] = values, smaller
        values, other_values = other_values, values
        smaller, other_smaller = other_smaller, smaller
    return smaller[rank]  # values now are 0, 1, 2, ...


def _hash(ids: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, which no row's place in the cache depends on."""
    word = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
