"""NNX layers of any table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.nnx.nn import dtypes

from jax_tt._ids.bags import Bags
from jax_tt._ids.split_ids import SplitIds
from jax_tt._layers.call import attended
from jax_tt._layers.nnx.hash import HashedModule
from jax_tt._layers.nnx.module import DEFAULT, read_state
from jax_tt._lookup.calls import lookup_rows, pooled_rows
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table


class TableEmbed(HashedModule):
    """Rows of any `Table`; `TTEmbed` and `Embed` are special cases.

    The layer has the methods of all kinds: those for row caches, for growth, for an order of ids and for the keys of
    hash tables. A method that the table does not support raises an error.

    Args:
        table: the kind and its sizes.
        lookup: options of the calls.
        promote_dtype: as in `TTEmbed`.
        options: ``rngs``, ``metadata`` of the parameters' variables, and ``hyperparameters``, variables of scalars that
            replace fields of the optimizer.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TableEmbed(jax_tt.tables.DenseTable(1000, 16), rngs=nnx.Rngs(0))
        >>> layer(jnp.array([1, 999])).shape
        (2, 16)

        A table of 64-bit keys:

        >>> import numpy as np
        >>> layer = jax_tt.TableEmbed(jax_tt.hash_table(1024, 16), rngs=nnx.Rngs(0))
        >>> keys = np.array([2**63 - 1, -5])
        >>> int(layer.insert(keys).counts["inserted"]), layer(keys).shape
        (2, (2, 16))
    """

    def __init__(
        self,
        table: Table,
        lookup: Lookup = DEFAULT,
        *,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        **options: Any,
    ) -> None:
        super().__init__(table, lookup, **options)
        self.promote_dtype = promote_dtype

    def __call__(
        self,
        inputs: jax.Array | SplitIds,
        out_sharding: Any = None,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Looks up ids.

        Args:
            inputs: integers of any shape, or `SplitIds` (not with an ``id_order``).
            out_sharding: sharding of the result under a mesh with explicit axes.
            grad_scale: fused only; the scale of the loss, by which the op divides the table's
                gradient.
            hyperparameters: fused only; fields of ``optimizer`` for this call, floats or traced scalars by name,
                e.g. ``{"learning_rate": rate}``.

        Returns:
            ``[*inputs.shape, features]``.

        Raises:
            ValueError: ``inputs`` are not integers.
        """
        result = self._call(lookup_rows, inputs, grad_scale, hyperparameters)
        if out_sharding is not None:
            result = jax.sharding.reshard(result, out_sharding)
        (result,) = self.promote_dtype((result,), dtype=self.dtype, inexact=False)
        return result

    def host_batch(self, ids: Any, *, sharding: Any = None) -> Any:
        """The ids as a compiled step takes them, from what a data loader gives; see `jax_tt.pipeline.host_batch`.

        Ids out of range are treated as ``bounds`` says.

        Args:
            ids, sharding: as in `jax_tt.pipeline.host_batch` with ``pooled=False``.
        """
        return self._host_batch(ids, False, sharding=sharding)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Scores queries against every row, without building the table.

        Args:
            query: floats ``[..., features]``.
            out_sharding: sharding of the result under a mesh with explicit axes.

        Returns:
            ``[..., num_embeddings]``, the inner products with all rows.

        Raises:
            ValueError: the last dimension of ``query`` is not ``features``.
            TypeError: the scores of a fused table are part of a loss; its update cannot be fused.
        """

        def promote(*arrays: jax.Array) -> Any:
            return self.promote_dtype(arrays, dtype=self.dtype)

        def scores(state: Any, query: jax.Array) -> jax.Array:
            return attended(self.table, state, query, self.lookup, promote)

        if out_sharding is not None:
            scores = jax.sharding.auto_axes(out_sharding=out_sharding)(scores)
        return scores(read_state(self), query)


class TableEmbedBag(HashedModule):
    """Pooled rows of any `Table`; `TTEmbedBag` and `EmbedBag` are special cases.

    Args:
        table: the kind and its sizes.
        lookup: options of the calls.
        rngs, metadata, hyperparameters: as in `TableEmbed`.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TableEmbedBag(
        ...     jax_tt.tables.DenseTable(1000, 16), jax_tt.Lookup("mean"), rngs=nnx.Rngs(0)
        ... )
        >>> layer(jax_tt.Bags.from_ragged([[17, 4], [], [999]])).shape
        (3, 16)
    """

    def __call__(
        self,
        bags: Bags | jax.Array,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Pools the rows of every bag.

        Args:
            bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
            grad_scale, hyperparameters: as in `TTEmbed`.

        Returns:
            ``[B, features]``; an empty bag is 0.
        """
        return self._call(pooled_rows, bags, grad_scale, hyperparameters)

    def host_batch(self, ids: Any, *, capacity: int | None = None, sharding: Any = None) -> Any:
        """The bags as a compiled step takes them, from what a data loader gives; see `jax_tt.pipeline.host_batch`.

        Ids out of range are treated as ``bounds`` says.

        Args:
            ids, capacity, sharding: as in `jax_tt.pipeline.host_batch`.
        """
        return self._host_batch(ids, True, capacity=capacity, sharding=sharding)
