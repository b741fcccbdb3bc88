"""The NNX half of the row cache: its variables, and what is done with them between steps."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jax_tt._cache import refresh
from jax_tt._cache.config import RowCache
from jax_tt._cache.directory import CacheDirectory
from jax_tt._cache.statistics import cache_statistics
from jax_tt._cache.table import CachedTable
from jax_tt._layers import _cached
from jax_tt._layers._nnx_table import TableModule
from jax_tt._layers._nnx_variables import CacheState, FusedParam
from jax_tt._shape import TTShape


class CachedModule(TableModule):
    """What a layer with a row cache has beside its table."""

    tt_shape: TTShape
    cache: RowCache | None
    method: str

    def _create_cache(self, dtype: Any) -> None:
        if self.cache is None:
            return
        directory, rows = _cached.fresh_cache(self.cache, self.tt_shape, dtype, self.optimizer)
        for name, value in directory.items():
            setattr(self, name, CacheState(value))
        kind: type[nnx.Variable[Any]] = CacheState
        if self.cache.gradients == "rows":
            kind = nnx.Param if self.optimizer is None else FusedParam
        for name, value in rows.items():
            setattr(self, name, kind(value))

    def _cached_table(self, table: Any) -> CachedTable:
        return _cached.cached_table(self._own_cache(), self.optimizer, table, self._value)

    def _keep(self, directory: CacheDirectory) -> None:
        if not self.deterministic:
            self._write(_cached.named_directory(directory))

    def _write(self, values: dict[str, jax.Array]) -> None:
        for name, value in values.items():
            getattr(self, name)[...] = value

    def populate(self) -> None:
        """Lets hot rows that were counted trade places with cold cached ones; see `jax_tt.populate_cache`.

        Call it between steps, under ``jit`` or not, never inside a loss. `FusedOptimizer.update` and
        `refresh_caches` do so by themselves where the cache has a ``refresh_every``.

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

    def cache_statistics(self) -> dict[str, int | float]:
        """Figures of the cache, read on the host; see `jax_tt.cache_statistics`."""
        return cache_statistics(self._cached_table(self._table()).directory)

    def _change(self, change: Any) -> None:
        table = change(
            self._cached_table(self._table()),
            self._own_cache(),
            num_embeddings=self.num_embeddings,
            optimizer=self.optimizer,
            method=self.method,
        )
        self._write(_cached.named_values(table, self.optimizer))

    def _table(self) -> Any:
        raise NotImplementedError

    def _own_cache(self) -> RowCache:
        if self.cache is None:
            raise ValueError(
                f"{self.label}: has no row cache; build it with cache=jax_tt.RowCache(capacity=...)."
            )
        return self.cache


def refresh_caches(model: Any) -> None:
    """Refreshes every row cache of a model whose ``refresh_every`` is due.

    Call it after each optimizer step, in the same ``jit``. `FusedOptimizer.update` does so by itself.

    Args:
        model: an NNX module; for linen there is `jax_tt.linen.refresh_caches`.

    Raises:
        TypeError: ``model`` is no NNX module.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> cache = jax_tt.RowCache(50, ways=5, refresh_every=2)
        >>> layer = jax_tt.TTEmbed(1000, 16, cache=cache, rngs=nnx.Rngs(0))
        >>> for step in range(2):
        ...     _ = layer(jnp.array([1, 2, 3]))
        ...     jax_tt.refresh_caches(layer)
        >>> layer.cache_statistics()["occupied"]
        3
    """
    modules = [module for _, module in nnx.iter_modules(model)]
    if not modules:
        raise TypeError(
            f"model: got {type(model).__name__}; expected an NNX module. The caches of a linen model are refreshed by "
            "jax_tt.linen.refresh_caches(model, variables, *inputs)."
        )
    for module in modules:
        if isinstance(module, CachedModule) and module.cache is not None:
            module.refresh()
