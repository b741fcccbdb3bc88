"""Populating, flushing and resetting a `CachedTable`; everything works under ``jit``."""

from __future__ import annotations

from typing import Any

from jax_tt._kinds.cached.maintain import emptied, flushed, populated, refreshed_if_due
from jax_tt._ops.cached_table import CachedTable, changed
from jax_tt._sets.row_cache import RowCache
from jax_tt.optimizers import Optimizer


def populate_cache(
    table: CachedTable,
    cache: RowCache,
    *,
    num_embeddings: int | None = None,
    optimizer: Optimizer | None = None,
    method: str = "auto",
) -> CachedTable:
    """Replaces cold cached rows by hot rows that were counted.

    With ``gradients="rows"``, evicted rows are written back into the cores, inserted rows are read from the cores, and
    the others keep their values bit for bit. With ``gradients="cores"``, all rows are read again.

    Args:
        table: the table; not inside a loss, since its cores may change.
        cache: the `RowCache` it was created with.
        num_embeddings: rows of the table; default all that the cores address.
        optimizer: the optimizer of a fused table; its state of inserted rows is reset.
        method: as in the ops.

    Returns:
        The table after the exchange.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> cache = jax_tt.RowCache(100, ways=4)
    >>> table = jax_tt.init_cached_table(cores, cache)
    >>> _, directory = jax_tt.cached_tt_lookup(table, jax.numpy.array([7, 7, 8]), cache)
    >>> table = jax_tt.populate_cache(table._replace(directory=directory), cache)
    >>> jax_tt.cache_statistics(table.directory)["occupied"]
    2
    """
    options = num_embeddings, optimizer, method
    return changed(populated, table, cache, *options)


def refresh_if_due(table: CachedTable, cache: RowCache, **options: Any) -> CachedTable:
    """`populate_cache` if the last was ``cache.refresh_every`` counted batches ago; otherwise the unchanged table.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> cache = jax_tt.RowCache(100, ways=4, refresh_every=1)
    >>> table = jax_tt.init_cached_table(cores, cache)
    >>> _, directory = jax_tt.cached_tt_lookup(table, jax.numpy.array([7, 8]), cache)
    >>> table = table._replace(directory=directory)
    >>> table = jax_tt.refresh_if_due(table, cache)
    >>> jax_tt.cache_statistics(table.directory)["occupied"]
    2
    """
    return changed(refreshed_if_due, table, cache, **options)


def flush_cache(table: CachedTable, cache: RowCache, **options: Any) -> CachedTable:
    """Writes all cached rows back into the cores, which then are the whole model, and reads the rows again.

    What the fit does not capture is lost; with ``write_back=None``, that is everything the rows learned. No row is
    evicted, and counts do not change.

    Args, Returns: as in `populate_cache`.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> cache = jax_tt.RowCache(100, ways=4)
    >>> table = jax_tt.init_cached_table(cores, cache)
    >>> _, directory = jax_tt.cached_tt_lookup(table, jax.numpy.array([7, 8]), cache)
    >>> table = table._replace(directory=directory)
    >>> table = jax_tt.flush_cache(jax_tt.populate_cache(table, cache), cache)
    >>> jax_tt.cache_statistics(table.directory)["written_back"]
    2
    """
    return changed(flushed, table, cache, **options)


def reset_cache(table: CachedTable, cache: RowCache, **options: Any) -> CachedTable:
    """Flushes the cache, then clears its rows, counts and statistics.

    Args, Returns: as in `populate_cache`.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> cache = jax_tt.RowCache(100, ways=4)
    >>> table = jax_tt.init_cached_table(cores, cache)
    >>> _, directory = jax_tt.cached_tt_lookup(table, jax.numpy.array([7, 8]), cache)
    >>> table = table._replace(directory=directory)
    >>> table = jax_tt.reset_cache(jax_tt.populate_cache(table, cache), cache)
    >>> jax_tt.cache_statistics(table.directory)["occupied"]
    0
    """
    return changed(emptied, table, cache, **options)
