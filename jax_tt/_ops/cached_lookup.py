"""Lookups and bags of a `CachedTable`."""

from __future__ import annotations

from typing import Any

import jax

from jax_tt._kinds.cached.names import directory_of
from jax_tt._lookup.calls import lookup_rows, pooled_rows
from jax_tt._ops.cached_table import CachedTable, described
from jax_tt._sets.cache_directory import CacheDirectory
from jax_tt._sets.row_cache import RowCache
from jax_tt._table.hoisted import fused_update
from jax_tt._table.options import Lookup, StepInputs, Update
from jax_tt.optimizers import Optimizer


def cached_tt_embed_bag(
    table: CachedTable,
    bags: Any,
    cache: RowCache,
    *,
    combiner: str = "sum",
    count: bool = True,
    optimizer: Optimizer | None = None,
    num_embeddings: int | None = None,
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    **update: Any,
) -> tuple[jax.Array, CacheDirectory]:
    """`tt_embed_bag` (or, with an optimizer, `fused_tt_embed_bag`) that reads hot rows from a cache.

    Differentiable in ``table.table`` and, with ``gradients="rows"``, in ``table.rows``.

    Args:
        table: `CachedTable`.
        bags: `Bags`, or integer ids ``[B, L]``.
        cache: the `RowCache` that the table was created with.
        combiner, num_embeddings, bounds, dtype, method, axis_name, name, precision: as in `tt_embed_bag`.
        count: whether to count the batch in the directory (training) or not (inference).
        optimizer: the optimizer of a fused table.
        **update: ``grad_scale``, ``skip_nonfinite``, ``stochastic_rounding``, ``key`` of `fused_tt_embed_bag`.

    Returns:
        ``[B, D]`` and the directory after the batch.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> cache = jax_tt.RowCache(100, ways=4)
    >>> table = jax_tt.init_cached_table(cores, cache)
    >>> out, directory = jax_tt.cached_tt_embed_bag(table, jax.numpy.array([[1, 2], [1, 3]]), cache)
    >>> out.shape, jax_tt.cache_statistics(directory)["unique_misses"]
    ((2, 8), 3)
    """
    lookup = Lookup(combiner, bounds, dtype, precision, method, axis_name, count)
    rule, inputs = _inputs(optimizer, update)
    cached, state = described(table, cache, rule, num_embeddings, name)
    result, state = pooled_rows(cached, state, bags, lookup, inputs)
    return result, directory_of(state)


def cached_tt_lookup(
    table: CachedTable,
    ids: Any,
    cache: RowCache,
    *,
    count: bool = True,
    optimizer: Optimizer | None = None,
    num_embeddings: int | None = None,
    bounds: str = "error",
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
    **update: Any,
) -> tuple[jax.Array, CacheDirectory]:
    """`tt_lookup` (or, with an optimizer, `fused_tt_lookup`) that reads hot rows from a cache.

    Args:
        table: `CachedTable`.
        ids: integers of any shape, or `SplitIds`.
        cache, count, optimizer, update: as in `cached_tt_embed_bag`.
        num_embeddings, bounds, dtype, method, axis_name, name, precision: as in `tt_lookup`.

    Returns:
        ``[*ids.shape, D]`` and the directory after the batch.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> cache = jax_tt.RowCache(100, ways=4)
    >>> table = jax_tt.init_cached_table(cores, cache)
    >>> rows, directory = jax_tt.cached_tt_lookup(table, jax.numpy.array([[1, 2, 9_999]]), cache)
    >>> rows.shape, int(directory.clock)
    ((1, 3, 8), 1)
    """
    lookup = Lookup("sum", bounds, dtype, precision, method, axis_name, count)
    rule, inputs = _inputs(optimizer, update)
    cached, state = described(table, cache, rule, num_embeddings, name)
    rows, state = lookup_rows(cached, state, ids, lookup, inputs)
    return rows, directory_of(state)


def _inputs(optimizer: Any, options: dict[str, Any]) -> tuple[Update | None, StepInputs]:
    """Splits the options of an update into its static description and its arrays."""
    if optimizer is None:
        if options:
            raise TypeError(
                f"{', '.join(options)}: of no use without an optimizer, whose update is all that they change."
            )
        return None, StepInputs()
    return fused_update(optimizer, **options)
