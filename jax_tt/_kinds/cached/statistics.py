"""Cache statistics, read on the host."""

from __future__ import annotations

import jax
import numpy as np

from jax_tt._base import words as _words
from jax_tt._sets.cache_directory import COUNTERS, CacheDirectory


def cache_statistics(directory: CacheDirectory) -> dict[str, int | float]:
    """Totals since the directory was created or reset. Blocks until the device is done.

    Returns:
        ``calls``: batches counted; ``requested``: ids in them; ``unique``: distinct ids, batch by batch;
        ``misses`` and ``unique_misses``: those that were not cached; ``conflict_unique_misses`` and
        ``conflict_misses``: those of them that a refresh in the same step could not insert; ``refreshes``,
        ``inserted``, ``evicted``, ``written_back``: refreshes, and rows changed by them; ``hit_rate``: fraction of
        requests that were hits; ``occupied`` and ``occupancy``: number and fraction of slots in use.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> table = jax_tt.init_cached_table(cores, jax_tt.RowCache(100, ways=4))
    >>> jax_tt.cache_statistics(table.directory)["occupancy"]
    0.0
    """
    words, tags = jax.device_get((directory.totals, directory.tags))
    totals: dict[str, int | float] = dict(
        zip(COUNTERS, _words.integers(words).tolist(), strict=True)
    )
    requested = totals["requested"]
    occupied = int(np.sum(tags >= 0))
    return totals | {
        "hit_rate": (requested - totals["misses"]) / requested if requested else 0.0,
        "occupied": occupied,
        "occupancy": occupied / tags.size,
    }
