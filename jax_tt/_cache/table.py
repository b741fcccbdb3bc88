"""`CachedTable`: cores, the rows cached in front of them, and the directory that says which those are."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._cache.config import RowCache
from jax_tt._cache.directory import CacheDirectory, init_directory
from jax_tt._ops._canonical import tt_table
from jax_tt._ops._table import FusedTable, init_fused_table
from jax_tt.optimizers import Optimizer


class CachedTable(NamedTuple):
    """A tensor-train table with a row cache.

    Attributes:
        table: cores ``[p_k, r_k, q_k, r_{k+1}]``, or a `FusedTable` of them.
        rows: cached rows ``[slots, D]``, or a `FusedTable` of them where they are trained by the fused optimizer.
        directory: `CacheDirectory`.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> table = jax_tt.init_cached_table(cores, jax_tt.RowCache(100, ways=4))
    >>> len(table.cores), table.values.shape
    (3, (100, 8))
    """

    table: Any
    rows: Any
    directory: CacheDirectory

    @property
    def cores(self) -> tuple[jax.Array, ...]:
        return self.table.cores if isinstance(self.table, FusedTable) else self.table

    @property
    def values(self) -> jax.Array:
        """The cached rows as an array."""
        return self.rows.cores[0] if isinstance(self.rows, FusedTable) else self.rows


def init_cached_table(
    table: Any,
    cache: RowCache,
    *,
    num_embeddings: int | None = None,
    optimizer: Optimizer | None = None,
) -> CachedTable:
    """A table with an empty cache.

    Args:
        table: cores of a tensor-train table, or a `FusedTable` of them.
        cache: sizes and policy.
        num_embeddings: rows of the table; default all that the cores address.
        optimizer: rule of the fused table.

    Returns:
        `CachedTable`.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> jax_tt.init_cached_table(cores, jax_tt.RowCache(100, ways=4)).values.shape
    (100, 8)
    """
    fused = isinstance(table, FusedTable)
    spec, cores = tt_table(table.cores if fused else table, num_embeddings)
    rows, directory = init_cache(cache, spec.num_embeddings, spec.features, cores[0].dtype)
    own: Any = rows
    if fused and cache.gradients == "rows":
        if optimizer is None:
            raise ValueError(
                "optimizer: got None for a FusedTable; expected its rule, which also trains the cached rows."
            )
        own = init_fused_table(rows, optimizer)
    return CachedTable(table if fused else tuple(cores), own, directory)


def init_cache(
    cache: RowCache, num_embeddings: int, features: int, dtype: Any
) -> tuple[jax.Array, CacheDirectory]:
    """Zero rows ``[slots, D]`` and an empty directory."""
    sets, ways, buckets, room = cache.layout(num_embeddings)
    directory = init_directory(sets, ways, buckets, room, cache.key_dtype(num_embeddings))
    return jnp.zeros((sets * ways, features), cache.dtype or dtype), directory
