"""Changes the capacity, shape or policy of a cache and keeps its rows and counts."""

from __future__ import annotations

from jax_tt._kinds.cached.resize import resized
from jax_tt._ops.cached_table import CachedTable, changed
from jax_tt._sets.row_cache import RowCache
from jax_tt.optimizers import Optimizer


def resize_cache(
    table: CachedTable,
    old: RowCache,
    new: RowCache,
    *,
    num_embeddings: int | None = None,
    optimizer: Optimizer | None = None,
    method: str = "auto",
) -> CachedTable:
    """Changes the capacity, ways, policy or counters of the cache of a table.

    A set keeps its hottest rows, with their values and optimizer state bit for bit; if sets or ways change, rows may
    move to other slots. The other rows are written back into the cores according to ``old.write_back`` and become
    ghosts. Ghosts keep their scores as far as there is room. If the cache grows, new slots are filled when it is next
    populated; some rows may be evicted even then, since the set of a row depends on the number of sets, unless the new
    number is a multiple of the old one. Under another policy, cached rows keep the step of their last request, and
    counts that the old policy did not keep start at zero.

    Args:
        table: the table; not inside a loss, since its cores may change.
        old: the `RowCache` it was created with.
        new: the new `RowCache`, with the same ``gradients``.
        num_embeddings: rows of the table; default all that the cores address.
        optimizer: the optimizer of a fused table.
        method: as in the ops.

    Returns:
        The table with the new cache.

    Raises:
        ValueError: ``old`` is not the cache of the table, or ``new`` has other ``gradients``.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> small, large = jax_tt.RowCache(100, ways=4), jax_tt.RowCache(200, ways=4)
    >>> table = jax_tt.init_cached_table(cores, small)
    >>> _, directory = jax_tt.cached_tt_lookup(table, jax.numpy.array([7, 8]), small)
    >>> table = jax_tt.populate_cache(table._replace(directory=directory), small)
    >>> table = jax_tt.resize_cache(table, small, large)
    >>> table.values.shape, jax_tt.cache_statistics(table.directory)["occupied"]
    ((200, 8), 2)
    """
    return changed(
        lambda cached, state, method: resized(cached, state, new, method, cached.num_embeddings)[0],
        table,
        old,
        num_embeddings,
        optimizer,
        method,
    )
