"""`CachedTable`: cores, cached rows, and the directory of the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jax_tt._kinds.cached.names import ROWS, directory_of, named_directory, outer, outer_name
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._ops.fused_table import FusedTable, fused_state, fused_table, tt_fused
from jax_tt._sets.cache_directory import CacheDirectory
from jax_tt._sets.row_cache import RowCache
from jax_tt._table.hoisted import hoisted
from jax_tt._table.options import Update
from jax_tt._table.table import named
from jax_tt.optimizers import Optimizer


class CachedTable(NamedTuple):
    """A tensor-train table with a row cache.

    Attributes:
        table: cores ``[p_k, r_k, q_k, r_{k+1}]``, or a `FusedTable` of them.
        rows: cached rows ``[slots, D]``, or a `FusedTable` of them if they are trained by the fused optimizer.
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

    taken_by = "cached_*"

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
        optimizer: the optimizer of a fused table.

    Returns:
        `CachedTable`.

    >>> import jax, jax_tt
    >>> cores = jax_tt.init_cores(jax.random.key(0), jax_tt.TTShape.suggest(10_000, 8, ranks=4))
    >>> jax_tt.init_cached_table(cores, jax_tt.RowCache(100, ways=4)).values.shape
    (100, 8)
    """
    fused = isinstance(table, FusedTable)
    if fused and cache.gradients == "rows" and optimizer is None:
        raise ValueError(
            "optimizer: got None for a FusedTable; expected its rule, which also trains the cached rows."
        )
    described, cores = TTTable.of(table.cores if fused else table, num_embeddings)
    if fused and optimizer is not None:
        described = dataclasses.replace(described, update=Update(hoisted(optimizer)[0]))
    cached = RowCachedTable(described, cache)
    fresh = cached.init_cache(cores[0].dtype)
    return CachedTable(
        table if fused else tuple(cores),
        _rows(cached, fresh) if fused else fresh[ROWS],
        directory_of(fresh),
    )


def described(
    given: Any,
    cache: RowCache,
    update: Update | None,
    num_embeddings: int | None = None,
    name: str | None = None,
) -> tuple[RowCachedTable, dict[str, Any]]:
    """Checks a `CachedTable` and returns its description and state."""
    if not isinstance(given, CachedTable):
        raise TypeError(
            f"table: got {type(given).__name__}; expected a CachedTable, made with "
            "jax_tt.init_cached_table(cores, cache)."
        )
    if update is None:
        table, cores = TTTable.of(given.table, num_embeddings, name=name)
        state = named(table, cores)
    else:
        table, state = tt_fused(given.table, update, num_embeddings, name)
    cached = RowCachedTable(table, cache)
    fused = update is not None and cached.trains_rows
    if isinstance(given.rows, FusedTable) != fused:
        optimizer = None if update is None else update.optimizer
        raise ValueError(
            f"table.rows: got {type(given.rows).__name__}, which does not go with gradients={cache.gradients!r} and "
            f"optimizer={optimizer!r}; pass the cache and the optimizer that init_cached_table was given."
        )
    wanted = (given.directory.slots, table.features)
    if given.values.shape != wanted:
        raise ValueError(
            f"table.rows: got rows of shape {given.values.shape}; this directory and these cores have {wanted}. Make "
            "the table with jax_tt.init_cached_table(cores, cache)."
        )
    return cached, state | state_of_cache(cached, given)


def state_of_cache(cached: RowCachedTable, given: CachedTable) -> dict[str, Any]:
    """The arrays of the cache by name."""
    table, given_rows = cached.rows_table, given.rows
    rows = fused_state(table, given_rows) if table.update else {"embedding": given_rows}
    return named_directory(given.directory) | outer(rows)


def cached_table(cached: RowCachedTable, state: Mapping[str, Any]) -> CachedTable:
    """The state as a `CachedTable`."""
    table = cached.table
    return CachedTable(
        table.params(state) if table.update is None else fused_table(table, state),
        _rows(cached, state),
        directory_of(state),
    )


def _rows(cached: RowCachedTable, state: Mapping[str, Any]) -> Any:
    rows = cached.rows_table
    if rows.update is None:
        return state[ROWS]
    return fused_table(rows, {name: state[outer_name(name)] for name in rows.trained_names})


def changed(
    change: Any,
    table: CachedTable,
    cache: RowCache,
    num_embeddings: int | None = None,
    optimizer: Optimizer | None = None,
    method: str = "auto",
) -> CachedTable:
    """The table after ``change(cached, state, method)``, one of `jax_tt._kinds.cached.maintain`."""
    if isinstance(table, CachedTable) and isinstance(table.table, FusedTable) and optimizer is None:
        raise ValueError("optimizer: got None for a fused table; expected its rule.")
    update = None if optimizer is None else Update(hoisted(optimizer)[0])
    cached, state = described(table, cache, update, num_embeddings)
    return cached_table(cached, change(cached, state, method))
