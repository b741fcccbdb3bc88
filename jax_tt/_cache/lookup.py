"""Lookups and bags of a `CachedTable`."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jax_tt._arguments import as_dtype
from jax_tt._cache import backend
from jax_tt._cache.config import RowCache
from jax_tt._cache.counting import count_batch
from jax_tt._cache.directory import CacheDirectory
from jax_tt._cache.keys import keys_of
from jax_tt._cache.sums import cached_sum
from jax_tt._cache.table import CachedTable
from jax_tt._dtypes import accumulator
from jax_tt._ops._batch import Batch
from jax_tt._ops._canonical import check_combiner, tt_table
from jax_tt._ops._combine import batch_to_sum, combine
from jax_tt._ops._explicit import over_explicit_axes, reshape_rows
from jax_tt._ops._inputs import bag_batch, lookup_batch
from jax_tt._ops._spec import TTSpec
from jax_tt._ops._table import FusedTable, tt_fused
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
        cache: the `RowCache` that the table was made for.
        combiner, num_embeddings, bounds, dtype, method, axis_name, name, precision: as in `tt_embed_bag`.
        count: count the batch in the directory (training), or leave it alone (inference).
        optimizer: the rule of a fused table.
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
    check_combiner(combiner)
    spec, table = _checked(table, cache, optimizer, update, num_embeddings, bounds, name, precision)
    spec, batch, bag_count = bag_batch(spec, bags, accumulator(table.cores[0].dtype))
    result_type = as_dtype("dtype", dtype, table.cores[0].dtype)
    options = {"method": method, "axis_name": axis_name}
    given = batch_to_sum(combiner, spec, batch)
    sums, directory = _sums(spec, table, given, cache, optimizer, count, options, update)
    result = combine(combiner, spec, batch, sums).reshape(bag_count, spec.features)
    return result.astype(result_type), directory


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
    spec, table = _checked(table, cache, optimizer, update, num_embeddings, bounds, name, precision)
    batch, shape = lookup_batch(spec, ids)
    result_type = as_dtype("dtype", dtype, table.cores[0].dtype)
    options = {"method": method, "axis_name": axis_name}
    sums, directory = _sums(spec, table, batch, cache, optimizer, count, options, update)
    return reshape_rows(sums, (*shape, spec.features)).astype(result_type), directory


def _checked(
    table: Any,
    cache: RowCache,
    optimizer: Any,
    update: dict[str, Any],
    num_embeddings: int | None,
    bounds: str,
    name: str | None,
    precision: Any,
) -> tuple[TTSpec, CachedTable]:
    if not isinstance(table, CachedTable):
        raise TypeError(
            f"table: got {type(table).__name__}; expected a CachedTable, made with "
            "jax_tt.init_cached_table(cores, cache)."
        )
    fused = optimizer is not None and cache.gradients == "rows"
    if isinstance(table.rows, FusedTable) != fused:
        raise ValueError(
            f"table.rows: got {type(table.rows).__name__}, which does not go with gradients={cache.gradients!r} and "
            f"optimizer={optimizer!r}; pass the cache and the optimizer that init_cached_table was given."
        )
    wanted = (table.directory.slots, math.prod(core.shape[2] for core in table.cores))
    if table.values.shape != wanted:
        raise ValueError(
            f"table.rows: got rows of shape {table.values.shape}; this directory and these cores have {wanted}. Make "
            "the table with jax_tt.init_cached_table(cores, cache)."
        )
    if optimizer is None:
        if update:
            raise TypeError(
                f"{', '.join(update)}: of no use without an optimizer, whose update is all that they change."
            )
        spec, cores = tt_table(table.table, num_embeddings, bounds, name, precision)
        return spec, table._replace(table=cores)
    spec, fused = tt_fused(table.table, optimizer, num_embeddings, bounds, name, precision)
    return spec, table._replace(table=fused)


def _sums(
    spec: TTSpec,
    table: CachedTable,
    batch: Batch,
    cache: RowCache,
    optimizer: Optimizer | None,
    count: bool,
    options: dict[str, Any],
    update: dict[str, Any],
) -> tuple[jax.Array, CacheDirectory]:
    method = options["method"]
    directory = jax.lax.stop_gradient(table.directory)

    def found(inputs: tuple[Batch, jax.Array]) -> tuple[jax.Array, jax.Array]:
        batch, tags = inputs
        keys = keys_of(spec, batch, tags.dtype)
        return keys, backend.probe(tags, keys.reshape(-1), method).reshape(keys.shape)

    def counted(inputs: tuple[CacheDirectory, jax.Array, jax.Array]) -> CacheDirectory:
        return count_batch(*inputs, cache.scoring, method, options["axis_name"])

    keys, slots = over_explicit_axes(
        found, (batch, directory.tags), batch, lambda axis: (P(axis, None), P(axis, None))
    )
    if optimizer is not None:
        options = options | {
            "grad_scale": None,
            "skip_nonfinite": False,
            "stochastic_rounding": True,
            "key": None,
            **update,
        }
    trained = cache.gradients == "rows"
    sums = cached_sum(spec, table.table, table.rows, batch, slots, optimizer, trained, **options)
    if count:
        directory = over_explicit_axes(
            counted, (directory, keys, slots), batch, lambda axis: jax.tree.map(_whole, directory)
        )
    return sums, directory


def _whole(leaf: jax.Array) -> P:
    del leaf
    return P()
