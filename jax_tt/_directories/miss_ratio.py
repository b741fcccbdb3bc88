"""Miss ratio against cache size, from a stream of ids; on the host, in numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_tt._base.arguments import as_number, expect, mismatch, one_of
from jax_tt._base.installed import require
from jax_tt._base.words import mix_wide

POLICIES = ("lru", "ideal")
_POINTS = 64  # default number of sizes


@dataclasses.dataclass(frozen=True)
class MissRatioCurve:
    """Share of requests that a cache of each size misses; made by `miss_ratio_curve`.

    Attributes:
        policy: ``"lru"`` or ``"ideal"``.
        sizes: rows of the cache, int64 ``[n]``, ascending.
        miss_ratios: float64 ``[n]``.
        requests: number of ids in the stream.
        distinct: number of distinct ids; an estimate if only a sample is followed.

    >>> import jax_tt
    >>> curve = jax_tt.cache.miss_ratio_curve([7, 7, 7, 8], [1, 2], policy="ideal")
    >>> curve.miss_ratios.tolist(), curve.distinct
    ([0.25, 0.0], 2)
    """

    policy: str
    sizes: np.ndarray
    miss_ratios: np.ndarray
    requests: int
    distinct: int

    def plot(self, ax: Any = None, **style: Any) -> Any:
        """Plots the curve with matplotlib, with a logarithmic size axis.

        Args:
            ax: axes to plot on; default those of the current figure.
            **style: arguments of ``ax.plot``.

        Returns:
            The axes.
        """
        if ax is None:
            pyplot: Any = require("matplotlib.pyplot", "MissRatioCurve.plot", "cli")
            ax = pyplot.gca()
        ax.plot(self.sizes, self.miss_ratios, **{"label": self.policy, **style})
        ax.set(xscale="log", xlabel="rows in the cache", ylabel="miss ratio", ylim=(0, 1.02))
        return ax


def miss_ratio_curve(
    ids: Any, sizes: Any = None, policy: str = "lru", *, sample: float = 1.0
) -> MissRatioCurve:
    """Miss ratio of caches of many sizes on a stream of ids, computed in one pass.

    ``"lru"`` is exact for a fully associative cache that starts empty and inserts every missed id immediately: the
    stack distance of each request is counted in O(log n). ``"ideal"`` is the miss ratio of the best fixed set of rows,
    the most requested ones of the stream, and so a bound for LFU if the distribution of ids does not change.

    Args:
        ids: integers of any shape, in the order of the requests; negative ones (padding) are ignored.
        sizes: rows of the caches; default 64 sizes up to the number of distinct ids, geometrically spaced.
        policy: ``"lru"`` or ``"ideal"``.
        sample: fraction of the *ids* to follow, chosen by their hash; distances are scaled up (SHARDS). For long
            streams: at 0.01, results for sizes above some thousand rows are accurate to about a percentage point.

    Returns:
        `MissRatioCurve`.

    >>> import jax_tt
    >>> jax_tt.cache.miss_ratio_curve([1, 2, 1, 3, 1, 2], sizes=[1, 2, 3]).miss_ratios.round(2).tolist()
    [1.0, 0.67, 0.5]
    """
    one_of("policy", policy, POLICIES)
    ids = stream(ids)
    as_number("sample", sample, "a number above 0, at most 1", lambda x: 0 < x <= 1)
    requests = ids.size
    if sample < 1:
        # 53 bits of the hash, the precision of the float.
        ids = ids[(mix_wide(ids) >> np.uint64(11)) < np.uint64(round(sample * 2**53))]
    counts = np.unique(ids, return_counts=True)[1]
    distinct = counts.size if sample == 1 else round(counts.size / sample)
    sizes = _sizes(sizes, distinct)
    # hit_at[k]: requests that hit in caches of size k + 1 and larger, but in no smaller one.
    hit_at = np.bincount(_stack_distances(ids)) if policy == "lru" else np.sort(counts)[::-1]
    hits = np.concatenate([[0], np.cumsum(hit_at)])[
        np.minimum(np.floor(sizes * sample).astype(np.int64), hit_at.size)
    ]
    # If the sample contains too few or too many requests, the difference is assumed to be hits.
    expected = requests * sample
    hits = np.clip(hits + (expected - ids.size), 0, expected)
    ratios = 1 - hits / expected if requests else np.ones(sizes.size)
    return MissRatioCurve(policy, sizes, ratios, requests, distinct)


def stream(ids: Any) -> np.ndarray:
    """Ids as one int64 vector without the negative ones."""
    array = np.asarray(ids)
    if array.size == 0:
        return np.zeros(0, np.int64)
    expect(array.dtype.kind in "iu", "ids", array, "integers", error=TypeError)
    array = array.reshape(-1).astype(np.int64)
    return array[array >= 0]


def _sizes(sizes: Any, distinct: int) -> np.ndarray:
    if sizes is None:
        return np.unique(np.geomspace(1, max(distinct, 1), _POINTS).round().astype(np.int64))
    array = np.asarray(sizes)
    if array.dtype.kind not in "iu" or array.ndim != 1 or array.size == 0 or array.min() < 1:
        raise mismatch("sizes", repr(sizes), "integers of at least 1, in one dimension")
    return np.unique(array.astype(np.int64))


def _stack_distances(ids: np.ndarray) -> np.ndarray:
    """For every repeated request, the number of distinct other ids since the previous request of its id.

    Let p be the position of the request before t of the same id. The number is that of the requests between p and t
    that are the first of their id after p: ``#{j < t: last[j] < p} - (p + 1)``, since ``last[j] < p`` for j = 0..p.
    """
    n = ids.size
    kind = np.int32 if n < 2**31 else np.int64
    order = np.argsort(ids, kind="stable").astype(kind)
    again = ids[order[1:]] == ids[order[:-1]]
    last = np.full(n, -1, kind)
    last[order[1:][again]] = order[:-1][again]
    repeat = last >= 0
    # Ranks of `last`, a permutation: first requests (last = -1) come before all others.
    has_next = np.zeros(n, bool)
    has_next[last[repeat]] = True
    rank = np.cumsum(~repeat, dtype=kind) - 1
    firsts = n - int(repeat.sum())
    rank[repeat] = firsts + (np.cumsum(has_next, dtype=kind) - 1)[last[repeat]]
    before = _smaller_before(rank)
    return before[repeat] - (last[repeat] + 1)


def _smaller_before(rank: np.ndarray) -> np.ndarray:
    """For each element of a permutation, the number of smaller elements before it.

    This is a radix sort from the highest bit. Elements that agree in all higher bits form a group, in their original
    order; an element with the bit set counts the elements without it that are before it in its group.
    """
    n, kind = rank.size, rank.dtype.type
    position = np.arange(n, dtype=kind)
    values, smaller = rank.copy(), np.zeros_like(rank)
    other_values, other_smaller = np.empty_like(rank), np.empty_like(rank)
    # In-place arithmetic is three times as fast as masks.
    for bit in reversed(range(max(n - 1, 0).bit_length())):
        to = values >> (bit + 1)
        to <<= bit + 1  # start of the group
        high = values >> bit
        high &= 1
        highs = np.cumsum(high, dtype=kind)
        highs -= high
        highs -= highs[to]  # before each element in its group
        lows = position - to
        lows -= highs
        # A stable partition: lows to the start of the group, highs to its second half.
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
