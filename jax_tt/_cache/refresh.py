"""Populating, flushing and resetting a `CachedTable`; all of it works under ``jit``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._cache import backend
from jax_tt._cache.config import RowCache
from jax_tt._cache.directory import add_to_statistics, init_directory
from jax_tt._cache.scores import aged
from jax_tt._cache.table import CachedTable
from jax_tt._cache.write_back import single_rows, write_back
from jax_tt._ops._rule import resolved
from jax_tt._tables.fused import FusedTable
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import named
from jax_tt._tables.tensor_train import TTTable
from jax_tt.optimizers import Optimizer


def populate_cache(
    table: CachedTable,
    cache: RowCache,
    *,
    num_embeddings: int | None = None,
    optimizer: Optimizer | None = None,
    method: str = "auto",
) -> CachedTable:
    """Lets hot rows that were counted trade places with cold cached ones.

    With ``gradients="rows"`` what the leaving rows learned is written back into the cores, and rows that come in are
    read from them; rows that stay keep their values bit for bit. With ``gradients="cores"`` every row is read anew.

    Args:
        table: the table; outside of a loss, since its cores may change.
        cache: the `RowCache` it was made for.
        num_embeddings: rows of the table; default all that the cores address.
        optimizer: the rule of a fused table, whose state of new rows starts afresh.
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
    described, _ = TTTable.of(table.cores, num_embeddings)
    before = table.directory
    directory, evicted, counts = backend.populate(before, method)
    directory = add_to_statistics(
        aged(directory, cache.scoring),
        refreshes=1,
        inserted=counts[0],
        evicted=counts[1],
        conflict_unique_misses=counts[2],
        conflict_misses=counts[3],
    )
    if cache.gradients == "cores":
        rows = _read(described, table.cores, directory.tags, method).astype(table.values.dtype)
        return table._replace(rows=rows, directory=directory)
    if cache.write_back is not None:
        table = written_back(described, table, cache, evicted.reshape(-1), method)
        directory = add_to_statistics(directory, written_back=counts[1])
    came = (directory.tags != before.tags).reshape(-1)
    new = _read(
        described, table.cores, jnp.where(directory.tags != before.tags, directory.tags, -1), method
    )
    rows = _with_rows(table.rows, came, new, optimizer)
    return table._replace(rows=rows, directory=directory)


def refresh_if_due(table: CachedTable, cache: RowCache, **options: Any) -> CachedTable:
    """`populate_cache` where it was ``cache.refresh_every`` counted batches ago; otherwise the table as it is.

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
    if cache.refresh_every is None:
        return table
    # Not clock % refresh_every: a step may count several batches, or an evaluation none.
    due = table.directory.clock - table.directory.refreshed >= cache.refresh_every
    return jax.lax.cond(
        due, lambda table: populate_cache(table, cache, **options), lambda table: table, table
    )


def flush_cache(
    table: CachedTable,
    cache: RowCache,
    *,
    num_embeddings: int | None = None,
    optimizer: Optimizer | None = None,
    method: str = "auto",
) -> CachedTable:
    """Writes what all cached rows learned back into the cores, which then are the whole model, and reads them anew.

    What the fit could not take up is lost, and with ``write_back=None`` all of it. No row leaves the cache, and counts
    stay as they are.

    Args, Returns: as `populate_cache`.

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
    described, _ = TTTable.of(table.cores, num_embeddings)
    tags = table.directory.tags
    if cache.gradients == "rows" and cache.write_back is not None:
        table = written_back(described, table, cache, tags.reshape(-1), method)
        written = add_to_statistics(table.directory, written_back=jnp.sum(tags >= 0))
        table = table._replace(directory=written)
    everything = jnp.ones(tags.size, bool)
    new = _read(described, table.cores, tags, method)
    if isinstance(table.rows, FusedTable):
        # The rows go on being trained: their optimizer state is as good as before.
        rows: Any = table.rows._replace(cores=(new.astype(table.values.dtype),))
    else:
        rows = _with_rows(table.rows, everything, new, optimizer)
    return table._replace(rows=rows)


def reset_cache(
    table: CachedTable,
    cache: RowCache,
    *,
    num_embeddings: int | None = None,
    optimizer: Optimizer | None = None,
    method: str = "auto",
) -> CachedTable:
    """Flushes, then forgets every row, count and statistic.

    Args, Returns: as `populate_cache`.

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
    table = flush_cache(
        table, cache, num_embeddings=num_embeddings, optimizer=optimizer, method=method
    )
    sets, ways = table.directory.tags.shape
    buckets, room = table.directory.ghost_tags.shape
    directory = init_directory(sets, ways, buckets, room, table.directory.tags.dtype)
    everything = jnp.ones(directory.tags.size, bool)
    rows = _with_rows(table.rows, everything, jnp.zeros_like(table.values), optimizer)
    return table._replace(rows=rows, directory=directory)


def _read(table: TTTable, cores: tuple[jax.Array, ...], ids: jax.Array, method: str) -> jax.Array:
    """Rows ``[ids.size, D]`` in the accumulator type; 0 for negative ids."""
    state = named(table, cores)
    lookup = resolved(table, state, Lookup(bounds="unchecked", method=method))
    return table.forward(state, single_rows(ids.reshape(-1)), lookup)[0][:, 0]


def written_back(
    described: TTTable, table: CachedTable, cache: RowCache, ids: jax.Array, method: str
) -> CachedTable:
    assert cache.write_back is not None
    key = jax.random.fold_in(
        jax.random.key(0, impl="threefry2x32"), table.directory.clock.astype(jnp.uint32)
    )
    cores = write_back(described, table.cores, ids, table.values, cache.write_back, key, method)
    if isinstance(table.table, FusedTable):
        return table._replace(table=table.table._replace(cores=cores))
    return table._replace(table=cores)


def _with_rows(rows: Any, chosen: jax.Array, new: jax.Array, optimizer: Optimizer | None) -> Any:
    """Rows with the chosen ones replaced and, where they are fused, their optimizer state as at the start."""
    values = rows.cores[0] if isinstance(rows, FusedTable) else rows
    values = jnp.where(chosen[:, None], new.astype(values.dtype), values)
    if not isinstance(rows, FusedTable):
        return values
    if optimizer is None:
        raise ValueError("optimizer: got None for a fused table; expected its rule.")
    fresh = tuple(
        jnp.where(chosen if slot.ndim == 1 else chosen[:, None], kind.init, slot)
        for kind, slot in zip(optimizer.slots, rows.slots[0], strict=True)
    )
    return rows._replace(cores=(values,), slots=(fresh,))
