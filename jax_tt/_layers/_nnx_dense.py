"""The NNX layer whose table is dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_tt._bags import Bags
from jax_tt._layers import _calls
from jax_tt._layers._initial import default_embedding_init
from jax_tt._layers._nnx_table import TableModule
from jax_tt._layers._options import check_options, check_sizes
from jax_tt._layers._pretrained import DenseFromPretrained
from jax_tt._ops._canonical import check_combiner
from jax_tt._ops._table import FusedTable
from jax_tt.optimizers import Optimizer

_TABLE = ("embedding",)


class EmbedBag(DenseFromPretrained, TableModule):
    """Pooled embeddings from a dense table: ``nnx.Embed`` for bags.

    Its parameter is ``embedding[num_embeddings, features]``.  With an ``optimizer`` only the rows
    of a batch are read and written by a step; without one the gradient is as large as the table.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"``, as in `TTEmbedBag`.
        bounds, dtype, param_dtype, optimizer, skip_nonfinite, stochastic_rounding, axis_name,
            method, name, rngs: as in `TTEmbed`.
        embedding_init: initialiser ``(key, shape, dtype) -> table`` (default: that of
            ``nnx.Embed``); may be wrapped in ``nnx.with_partitioning``.
        embedding_metadata: metadata for the table's variable, and for slots of its shape.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.EmbedBag(1000, 16, combiner="mean", rngs=nnx.Rngs(0))
        >>> layer(jax_tt.Bags.from_ragged([[17, 4], [], [999]])).shape
        (3, 16)
    """

    embedding: nnx.Param

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        combiner: str = "sum",
        bounds: str = "warn",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: Callable[..., Any] = default_embedding_init,
        optimizer: Optimizer | None = None,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = True,
        axis_name: Any = None,
        method: str = "auto",
        name: str | None = None,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        check_sizes(num_embeddings, features)
        self._set_optimizer(optimizer)
        check_options(
            bounds=bounds, method=method, optimizer=self.optimizer, param_dtype=param_dtype
        )
        self.combiner = check_combiner(combiner)
        self.num_embeddings = num_embeddings
        self.features = features
        self.bounds = bounds
        self.param_dtype = param_dtype
        self.skip_nonfinite = skip_nonfinite
        self.stochastic_rounding = stochastic_rounding
        self.axis_name = axis_name
        self.method = method
        self.name = name
        shape = (num_embeddings, features)
        value = embedding_init(rngs.params(), shape, param_dtype)
        self._create({"embedding": value}, (shape,), embedding_metadata)
        self.dtype = self.embedding.dtype if dtype is None else dtype

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
        update = _calls.Update(grad_scale, hyperparameters)
        result = _calls.dense_bag(self, self._table(), bags, self.combiner, update)
        self._count_out_of_range(bags, self.num_embeddings)
        return result

    def _table(self) -> jax.Array | FusedTable:
        return self.embedding[...] if self.optimizer is None else self._fused(_TABLE)
