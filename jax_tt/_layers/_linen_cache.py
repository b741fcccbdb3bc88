"""The linen half of the row cache: its variables, and what is done with them between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._cache import refresh
from jax_tt._cache.config import RowCache
from jax_tt._cache.directory import CacheDirectory
from jax_tt._cache.table import CachedTable
from jax_tt._layers import _cached
from jax_tt._layers._linen_table import TableModule

ROW_CACHE = "row_cache"


class CachedModule(TableModule):
    """What a layer with a row cache has beside its table.

    The directory is in the collection ``row_cache``; a call counts what it is asked for where that is mutable, so
    training applies with ``mutable=["row_cache"]`` and inference without. Cached rows are in ``params``, in
    ``_overwrite_with_gradient`` beside a fused table, or, with ``gradients="cores"``, in ``row_cache`` too.
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
        return _cached.cached_table(self._own_cache(), self.optimizer, self.table, read)

    def _keep(self, directory: CacheDirectory) -> None:
        if not self.deterministic:
            for name, value in _cached.named_directory(directory).items():
                self.put_variable(ROW_CACHE, name, value)

    def populate(self) -> None:
        """Lets hot rows that were counted trade places with cold cached ones; see `jax_tt.populate_cache`.

        Between steps: ``_, new = model.apply(variables, method="populate", mutable=True)`` for a layer of its own,
        or with ``method=lambda model: model.items.populate()`` for one inside a model.

        Raises:
            ValueError: the layer has no cache.
        """
        self._change(refresh.populate_cache)

    def refresh(self) -> None:
        """`populate` if ``refresh_every`` batches have been counted since the last time; otherwise nothing."""
        self._change(refresh.refresh_if_due)

    def flush(self) -> None:
        """Writes what the cached rows learned back into the cores; see `jax_tt.flush_cache`."""
        self._change(refresh.flush_cache)

    def reset_cache(self) -> None:
        """Flushes, then forgets all rows, counts and statistics; see `jax_tt.reset_cache`."""
        self._change(refresh.reset_cache)

    def _change(self, change: Any) -> None:
        table = change(
            self._cached_table(),
            self._own_cache(),
            num_embeddings=self.num_embeddings,
            optimizer=self.optimizer,
            method=self.method,
        )
        for name, value in _cached.named_values(table, self.optimizer).items():
            collection = self._collection(name)
            box = self.get_variable(collection, name)
            self.put_variable(collection, name, nn.meta.replace_boxed(box, value))

    def _collection(self, name: str) -> str:
        collections = (ROW_CACHE, "params", OVERWRITE_WITH_GRADIENT)
        return next(c for c in collections if self.has_variable(c, name))

    def _own_cache(self) -> RowCache:
        if self.cache is None:
            raise ValueError(
                f"{self.label}: has no row cache; build it with cache=jax_tt.RowCache(capacity=...)."
            )
        return self.cache


def cache_directory(variables: Mapping[str, Any]) -> CacheDirectory:
    """The directory of one layer, for `jax_tt.cache_statistics`.

    Args:
        variables: what the collection ``row_cache`` holds for that layer.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt
        >>> from jax_tt.linen import TTEmbed, cache_directory
        >>> layer = TTEmbed(1000, 16, cache=jax_tt.RowCache(50, ways=5))
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> rows, counted = layer.apply(variables, jnp.array([1, 2, 2]), mutable=["row_cache"])
        >>> jax_tt.cache_statistics(cache_directory(counted["row_cache"]))["requested"]
        3
    """
    return CacheDirectory(*(variables[name] for name in _cached.DIRECTORY))


def _initial(fresh: Callable[[], Any], part: int, name: str) -> Callable[[], jax.Array]:
    return lambda: fresh()[part][name]
