"""A table with a row cache, its state in three parts that tests replace and differentiate one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

import jax_tt
from jax_tt import RowCache
from jax_tt._directories.cache_directory import CacheDirectory
from jax_tt._kinds.cached.table import cache_directory_of, named_cache_directory, outer_name


class Parts(NamedTuple):
    """Cores and cached rows, each as arrays or as the state of a fused table, and the directory."""

    table: Any
    rows: Any
    directory: CacheDirectory

    @property
    def cores(self) -> tuple[jax.Array, ...]:
        if not _is_fused(self.table):
            return self.table
        return tuple(array for name, array in self.table.items() if name.startswith("core_"))

    @property
    def values(self) -> jax.Array:
        return self.rows["embedding"] if _is_fused(self.rows) else self.rows

    @property
    def slots(self) -> list[jax.Array]:
        """The optimizer state of the rows of a fused table."""
        return [array for name, array in self.rows.items() if name.startswith("slot_")]


def init_parts(
    given: Any, cache: RowCache, *, num_embeddings: Any = None, optimizer: Any = None
) -> Parts:
    """Cores, or the state of a fused table of them, with an empty cache."""
    update = None if optimizer is None else jax_tt.Update(optimizer)
    cores = Parts(given, None, None).cores
    table = _table(cores, cache, update, num_embeddings)
    params = dict(zip(table.table.spec.param_names, cores, strict=True))
    return _parts(table, params | table.init_rest(params))._replace(table=given)


def lookup(
    parts: Parts, ids: Any, cache: RowCache, **options: Any
) -> tuple[jax.Array, CacheDirectory]:
    return _asked(jax_tt.lookup, parts, ids, cache, **options)


def embed_bag(
    parts: Parts, bags: Any, cache: RowCache, **options: Any
) -> tuple[jax.Array, CacheDirectory]:
    return _asked(jax_tt.lookup_bags, parts, bags, cache, **options)


def populate(parts: Parts, cache: RowCache, **options: Any) -> Parts:
    return _changed(jax_tt.cache.populate, parts, cache, (), **options)


def refresh(parts: Parts, cache: RowCache, **options: Any) -> Parts:
    return _changed(jax_tt.cache.refresh, parts, cache, (), **options)


def flush(parts: Parts, cache: RowCache, **options: Any) -> Parts:
    return _changed(jax_tt.cache.flush, parts, cache, (), **options)


def reset(parts: Parts, cache: RowCache, **options: Any) -> Parts:
    return _changed(jax_tt.cache.reset, parts, cache, (), **options)


def fill(parts: Parts, cache: RowCache, ids: Any, *, weights: Any = None, **options: Any) -> Parts:
    return _changed(jax_tt.cache.fill, parts, cache, (ids, weights), **options)


def resize(parts: Parts, old: RowCache, new: RowCache, **options: Any) -> Parts:
    return _changed(jax_tt.cache.resize, parts, old, (new,), **options)


def _asked(
    op: Any,
    parts: Parts,
    ids: Any,
    cache: RowCache,
    *,
    combiner: str = "sum",
    count: bool = True,
    optimizer: Any = None,
    num_embeddings: Any = None,
    bounds: str = "error",
    method: str = "auto",
    axis_name: Any = None,
    **update: Any,
) -> tuple[jax.Array, CacheDirectory]:
    rule = None if optimizer is None else jax_tt.Update(optimizer, **update)
    table = _table(parts.cores, cache, rule, num_embeddings)
    options = jax_tt.Lookup(combiner, bounds, None, None, method, axis_name, count)
    rows, state = op(table, _state(table, parts), ids, options)
    return rows, cache_directory_of(state)


def _changed(
    change: Any,
    parts: Parts,
    cache: RowCache,
    arguments: tuple[Any, ...],
    *,
    num_embeddings: Any = None,
    optimizer: Any = None,
    method: str = "auto",
) -> Parts:
    update = None if optimizer is None else jax_tt.Update(optimizer)
    table = _table(parts.cores, cache, update, num_embeddings)
    after = change(table, _state(table, parts), *arguments, method=method)
    return _parts(table, after) if isinstance(after, dict) else _parts(*after)


def _table(
    cores: Any, cache: RowCache, update: Any, num_embeddings: Any
) -> jax_tt.tables.RowCachedTable:
    return jax_tt.tables.RowCachedTable(
        jax_tt.tables.TTTable.of(cores, num_embeddings, update)[0], cache
    )


def _parts(table: Any, state: Any) -> Parts:
    cores, rows = table.table, table.rows_table
    of_rows = {name: state[outer_name(name)] for name in rows.spec.trained_names}
    of_cores = {name: state[name] for name in cores.spec.trained_names}
    return Parts(
        cores.spec.params(state) if cores.update is None else of_cores,
        of_rows["embedding"] if rows.update is None else of_rows,
        cache_directory_of(state),
    )


def _state(table: Any, parts: Parts) -> dict[str, Any]:
    cores, rows = parts.table, parts.rows
    if not _is_fused(cores):
        cores = table.table.spec.named(cores)
    if not _is_fused(rows):
        rows = {"embedding": rows}
    rows = {outer_name(name): value for name, value in rows.items()}
    return cores | rows | named_cache_directory(parts.directory)


def _is_fused(part: Any) -> bool:
    return isinstance(part, dict)
