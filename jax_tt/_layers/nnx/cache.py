"""Maintenance of row caches between steps in NNX."""

from __future__ import annotations

from functools import partial
from typing import Any

from flax import nnx

from jax_tt._kinds.cached.maintain import emptied, flushed, populated
from jax_tt._kinds.cached.names import directory_of
from jax_tt._kinds.cached.statistics import cache_statistics
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._layers.change import cache_filled
from jax_tt._layers.nnx.table import TableModule, maintain, read_state


class CachedModule(TableModule):
    """A layer that may have a row cache."""

    def populate(self) -> None:
        """Replaces cold cached rows by hot rows that were counted; see `jax_tt.populate_cache`.

        Call it between steps, under ``jit`` or not, but not inside a loss. `FusedOptimizer.update` and
        `refresh_caches` do this automatically if the cache has a ``refresh_every``.

        Raises:
            ValueError: the layer has no cache.
        """
        self._change(populated)

    def fill_cache(self, ids: Any, weights: Any = None) -> None:
        """Puts the most frequent rows of a sample of ids into the cache; see `jax_tt.fill_cache`.

        Call it before training or between steps, outside of ``jit``. Without ``refresh_every``, the cache then holds
        these rows until it is filled or populated again.

        Args:
            ids: a sample of requested ids, integers of any shape; negative ids are ignored.
            weights: what each id counts; default 1.

        Raises:
            ValueError, TypeError: the layer has no cache, or the sample does not fit.

        Example:
            >>> import jax_tt
            >>> from flax import nnx
            >>> layer = jax_tt.TTEmbed(1000, 8, cache=jax_tt.RowCache(50, ways=5), rngs=nnx.Rngs(0))
            >>> layer.fill_cache([[3, 1, 4], [1, 5, 9]])
            >>> layer.cache_statistics()["occupied"]
            5
        """
        self._change(partial(cache_filled, ids=ids, weights=weights))

    def refresh(self) -> None:
        """Calls `populate` if ``refresh_every`` batches have been counted since the last time."""
        self._cached()
        maintain(self)

    def flush(self) -> None:
        """Writes the cached rows back into the cores; see `jax_tt.flush_cache`."""
        self._change(flushed)

    def reset_cache(self) -> None:
        """Flushes the cache, then clears its rows, counts and statistics; see `jax_tt.reset_cache`."""
        self._change(emptied)

    def cache_statistics(self) -> dict[str, int | float]:
        """Statistics of the cache, read on the host; see `jax_tt.cache_statistics`."""
        self._cached()
        return cache_statistics(directory_of(read_state(self)))

    def _change(self, change: Any) -> None:
        after = change(self._cached(), read_state(self), self.lookup.method)
        for name, value in after.items():
            getattr(self, name)[...] = value

    def _cached(self) -> RowCachedTable:
        found = self.table.cached
        if found is None:
            raise ValueError(
                f"{self.table.ids.label}has no row cache; build it with cache=jax_tt.RowCache(capacity=...)."
            )
        return found


def refresh_caches(model: Any) -> None:
    """Refreshes every row cache of a model whose ``refresh_every`` is due.

    Call it after each optimizer step, in the same ``jit``. `FusedOptimizer.update` does this automatically.

    Args:
        model: an NNX module; for linen use `jax_tt.linen.refresh_caches`.

    Raises:
        TypeError: ``model`` is not an NNX module.

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
        if isinstance(module, TableModule):
            maintain(module)
