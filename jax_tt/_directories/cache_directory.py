"""`CacheDirectory`: which rows are cached, and how often cached and other rows were requested."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base import words

POLICIES = ("lfu", "lru")

# What the counts of a batch and those of a refresh are.
OBSERVED = ("requested", "unique", "misses", "unique_misses")
POPULATED = ("inserted", "evicted", "conflict_unique_misses", "conflict_misses")
# What the rows of `CacheDirectory.totals` count.
COUNTERS = ("calls", *OBSERVED, "refreshes", *POPULATED, "written_back")

GHOSTS = ("ghost_tags", "ghost_scores", "ghost_touched", "ghost_recent")


class CacheDirectory(NamedTuple):
    """State of the cache policy. All state of a row is stored in the set that its id hashes to.

    A row is *cached* (it has a slot) or, if it was requested recently, a *ghost* (it is only counted). Empty entries
    have id -1 and zeros elsewhere.

    Attributes:
        tags: ids of the cached rows, int32 or int64 ``[sets, ways]``; slot ``s * ways + w`` is way w of set s.
        scores: int32 ``[sets, ways]``. LFU: the number of requests; with a half-life, 1024 for each current one. LRU:
            1024 for every step from ``refreshed`` to the last request, plus the requests in that step, at most 1023.
        touched: int32 ``[sets, ways]``, step of the last request.
        ghost_tags, ghost_scores, ghost_touched: the same for ghosts, ``[buckets, room]``; every set has the same
            number of consecutive buckets, and an id is counted in one of them.
        ghost_recent: int32 ``[buckets, room]``, requests in the step ``ghost_touched``.
        clock: int32 scalar, number of batches counted so far.
        refreshed: int32 scalar, ``clock`` when the cache was last populated.
        unaged: int32 scalar, requests since scores were last halved.
        totals: uint32 ``[len(COUNTERS), 2]``, 64-bit totals as low and high word.

    >>> from jax_tt._directories.cache_directory import init_directory
    >>> directory = init_directory(25, 4, buckets=50, room=4, key_dtype="int32")
    >>> directory.tags.shape, directory.slots
    ((25, 4), 100)
    """

    tags: Any
    scores: Any
    touched: Any
    ghost_tags: Any
    ghost_scores: Any
    ghost_touched: Any
    ghost_recent: Any
    clock: Any
    refreshed: Any
    unaged: Any
    totals: Any

    @property
    def slots(self) -> int:
        """Number of slots: sets times ways."""
        return self.tags.shape[0] * self.tags.shape[1]

    def statistics(self) -> dict[str, int | float]:
        """The totals and the occupancy, as `jax_tt.cache.statistics` describes them."""
        counts, tags = jax.device_get((self.totals, self.tags))
        totals: dict[str, int | float] = dict(
            zip(COUNTERS, words.integers(counts).tolist(), strict=True)
        )
        requested = totals["requested"]
        occupied = int(np.sum(tags >= 0))
        return totals | {
            "hit_rate": (requested - totals["misses"]) / requested if requested else 0.0,
            "occupied": occupied,
            "occupancy": occupied / tags.size,
        }


def init_directory(sets: int, ways: int, buckets: int, room: int, key_dtype: Any) -> CacheDirectory:
    """An empty directory; ``buckets`` is a multiple of ``sets``."""
    # Separate buffers: a donated state must not contain one array twice.
    return CacheDirectory(
        tags=jnp.full((sets, ways), -1, key_dtype),
        scores=jnp.zeros((sets, ways), jnp.int32),
        touched=jnp.zeros((sets, ways), jnp.int32),
        ghost_tags=jnp.full((buckets, room), -1, key_dtype),
        ghost_scores=jnp.zeros((buckets, room), jnp.int32),
        ghost_touched=jnp.zeros((buckets, room), jnp.int32),
        ghost_recent=jnp.zeros((buckets, room), jnp.int32),
        clock=jnp.zeros((), jnp.int32),
        refreshed=jnp.zeros((), jnp.int32),
        unaged=jnp.zeros((), jnp.int32),
        totals=jnp.zeros((len(COUNTERS), 2), jnp.uint32),
    )


def add_to_statistics(directory: CacheDirectory, **counts: jax.Array | int) -> CacheDirectory:
    """Adds to the 64-bit totals."""
    more = jnp.stack([jnp.asarray(counts.get(name, 0)).astype(jnp.uint32) for name in COUNTERS])
    return directory._replace(totals=words.added(directory.totals, more))
