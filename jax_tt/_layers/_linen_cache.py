"""The linen half of the row cache: its variables in a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from jax_tt._cache.config import RowCache
from jax_tt._cache.directory import CacheDirectory
from jax_tt._cache.table import CachedTable
from jax_tt._layers import _cached
from jax_tt._layers._linen_table import TableModule
from jax_tt._layers._linen_variables import ROW_CACHE


class CachedModule(TableModule):
    """What a layer with a row cache has beside its table.

    The directory is in the collection ``row_cache``; a call counts what it is asked for where that is mutable, so
    training applies with ``mutable=["row_cache"]`` and inference without. Cached rows are in ``params``, in
    ``_overwrite_with_gradient`` beside a fused table, or, with ``gradients="cores"``, in ``row_cache`` too.
    `refresh_caches` and its siblings change them between steps.
    """

    @property
    def deterministic(self) -> bool:
        """Whether this call leaves the counts alone."""
        return self.is_initializing() or not self.is_mutable_collection(ROW_CACHE)

    def _declare_cache(self, dtype: Any) -> None:
        _cached.check_cache(self.cache, self.num_embeddings)
        if self.cache is None:
            return
        cache: RowCache = self.cache
        fresh = functools.cache(
            lambda: _cached.fresh_cache(cache, self.tt_shape, dtype, self.optimizer)
        )
        directory, rows = jax.eval_shape(fresh.__wrapped__)
        values: dict[str, Any] = {}
        for name in directory:
            values[name] = self.variable(ROW_CACHE, name, _initial(fresh, 0, name)).value
        for name in rows:
            values[name] = self._declare_row(name, _initial(fresh, 1, name))
        self._cache_values = values

    def _declare_row(self, name: str, init: Callable[[], jax.Array]) -> Any:
        if self.cache.gradients == "cores":
            return self.variable(ROW_CACHE, name, init).value
        if self.optimizer is None:
            return self.param(name, lambda key: init())
        return nn.meta.unbox(self._overwritten(name, lambda key: init()))

    def _cached_table(self) -> CachedTable:
        read = self._cache_values.__getitem__
        return _cached.cached_table(self.cache, self.optimizer, self.table, read)

    def _keep(self, directory: CacheDirectory) -> None:
        if not self.deterministic:
            for name, value in _cached.named_directory(directory).items():
                self.put_variable(ROW_CACHE, name, value)


def _initial(fresh: Callable[[], Any], part: int, name: str) -> Callable[[], jax.Array]:
    return lambda: fresh()[part][name]
