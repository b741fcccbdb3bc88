"""Names of a cache's variables in a layer, and the way between them and a `CachedTable`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_tt._cache.config import RowCache
from jax_tt._cache.directory import CacheDirectory
from jax_tt._cache.table import CachedTable, init_cache
from jax_tt._layers._names import core_names
from jax_tt._ops import _table
from jax_tt._ops._table import FusedTable, init_fused_table
from jax_tt._shape import TTShape
from jax_tt.optimizers import Optimizer

DIRECTORY = tuple(f"cache_{field}" for field in CacheDirectory._fields)
ROWS = "cache_rows"
SCALARS = tuple(f"cache_{part}" for part in _table.SCALARS)


def check_cache(cache: Any, num_embeddings: int) -> None:
    """Refuses what is no `RowCache`, or one that this table cannot have."""
    if cache is None:
        return
    if not isinstance(cache, RowCache):
        raise TypeError(
            f"cache: got {cache!r}; expected None or a RowCache, e.g. cache=jax_tt.RowCache(capacity=10_000)."
        )
    cache.layout(num_embeddings)
    cache.key_dtype(num_embeddings)


def rows_are_fused(cache: RowCache, optimizer: Optimizer | None) -> bool:
    """Whether the cached rows are stepped by the fused optimizer."""
    return optimizer is not None and cache.gradients == "rows"


def fresh_cache(
    cache: RowCache, shape: TTShape, dtype: Any, optimizer: Optimizer | None
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Initial values by variable name: the directory, and the rows with their optimizer state."""
    rows, directory = init_cache(cache, shape.num_embeddings, shape.features, dtype)
    values = {ROWS: rows}
    if optimizer is not None and rows_are_fused(cache, optimizer):
        values |= _named(init_fused_table(rows, optimizer), optimizer)
    return dict(zip(DIRECTORY, directory, strict=True)), values


def cached_table(
    cache: RowCache, optimizer: Optimizer | None, table: Any, read: Callable[[str], Any]
) -> CachedTable:
    """The table with its cache, from variables that ``read`` returns by name."""
    rows = read(ROWS)
    if optimizer is not None and rows_are_fused(cache, optimizer):
        slots = tuple(read(f"cache_slot_{slot.name}") for slot in optimizer.slots)
        rows = FusedTable((rows,), (slots,), *map(read, SCALARS))
    return CachedTable(table, rows, CacheDirectory(*map(read, DIRECTORY)))


def named_directory(directory: CacheDirectory) -> dict[str, jax.Array]:
    """Values of the directory by variable name."""
    return dict(zip(DIRECTORY, directory, strict=True))


def named_values(table: CachedTable, optimizer: Optimizer | None) -> dict[str, jax.Array]:
    """Values of every variable that populating may change, by name."""
    values = named_directory(table.directory) | {ROWS: table.values}
    values |= dict(zip(core_names(len(table.cores)), table.cores, strict=True))
    if optimizer is not None and isinstance(table.rows, FusedTable):
        values |= _named(table.rows, optimizer)
    return values


def _named(rows: FusedTable, optimizer: Optimizer) -> dict[str, jax.Array]:
    slots: Sequence[Any] = rows.slots[0]
    return {
        f"cache_slot_{slot.name}": value for slot, value in zip(optimizer.slots, slots, strict=True)
    } | {name: getattr(rows, part) for name, part in zip(SCALARS, _table.SCALARS, strict=True)}
