"""Maintenance of row caches between steps in NNX."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jax_tt._kinds.cached.fill import fill
from jax_tt._kinds.cached.maintain import flush, populate, reset, statistics
from jax_tt._kinds.cached.table import cached_part
from jax_tt._layers.nnx.module import TableModule, maintain, read_state


class CachedModule(TableModule):
    """A layer that may have a row cache."""

    def populate(self) -> None:
        """Replaces cold cached rows by hot rows that were counted; see `jax_tt.cache.populate`.

        Call it between steps, under ``jit`` or not, but not inside a loss. `FusedOptimizer.update` and
        `refresh_caches` do this automatically if the cache has a ``refresh_every``.

        Raises:
            ValueError: the layer has no cache.
        """
        self._replace(populate(self.table, read_state(self), self.lookup.method))

    def fill_cache(self, ids: Any, weights: Any = None) -> None:
        """Puts the most frequent rows of a sample of ids into the cache; see `jax_tt.cache.fill`.

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
        self._replace(fill(self.table, read_state(self), ids, weights, self.lookup.method))

    def refresh(self) -> None:
        """Calls `populate` if ``refresh_every`` batches have been counted since the last time."""
        cached_part(self.table)
        maintain(self)

    def flush(self) -> None:
        """Writes the cached rows back into the cores; see `jax_tt.cache.flush`."""
        self._replace(flush(self.table, read_state(self), self.lookup.method))

    def reset_cache(self) -> None:
        """Flushes the cache, then clears its rows, counts and statistics; see `jax_tt.cache.reset`."""
        self._replace(reset(self.table, read_state(self), self.lookup.method))

    def cache_statistics(self) -> dict[str, int | float]:
        """Statistics of the cache, read on the host; see `jax_tt.cache.statistics`."""
        return statistics(self.table, read_state(self))

    def _replace(self, after: dict[str, Any]) -> None:
        for name, value in after.items():
            getattr(self, name)[...] = value


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
