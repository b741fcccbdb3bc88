"""Linen layers whose table is dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax.linen import dtypes

from jax_tt._layers.linen.table import EmbedBagModule, EmbedModule, FactoryModule
from jax_tt._layers.pretrained import DenseFromPretrained
from jax_tt._ops.describe import dense_table
from jax_tt._table.initial_rows import default_embedding_init


class DenseLayer(DenseFromPretrained, FactoryModule, kw_only=True):
    """What `Embed` and `EmbedBag` share."""

    _factory = staticmethod(dense_table)
    embedding_init: Callable[..., Any] = default_embedding_init

    @property
    def embedding(self) -> jax.Array:
        """The table ``[num_embeddings, features]``."""
        return self.state["embedding"]


class EmbedBag(DenseLayer, EmbedBagModule, kw_only=True):
    """Pooled embeddings from a dense table: ``nn.Embed`` for bags.

    Its variable is ``embedding[num_embeddings, features]``, in ``params`` or, with an
    ``optimizer``, in ``_overwrite_with_gradient`` (see `TTEmbed`): only the rows of a batch are
    then read and written by a step.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"``, as in `TTEmbedBag`.
        bounds, dtype, param_dtype, precision, optimizer, skip_nonfinite,
            stochastic_rounding, max_gradient, axis_name, method: as in `TTEmbed`.
        embedding_init: initialiser ``(key, shape, dtype) -> table`` (default: that of
            ``nn.Embed``); may be boxed, e.g. by ``nn.with_partitioning``, and slots of the same
            shape are boxed like it.

    Example:
        >>> import jax
        >>> import jax_tt.linen
        >>> layer = jax_tt.linen.EmbedBag(1000, 16, combiner="mean")
        >>> bags = jax_tt.Bags.from_ragged([[17, 4], [], [999]])
        >>> variables = layer.init(jax.random.key(0), bags)
        >>> layer.apply(variables, bags).shape
        (3, 16)
    """

    combiner: str = "sum"


class Embed(DenseLayer, EmbedModule, kw_only=True):
    """Rows of a dense table: ``nn.Embed`` with checked ids and an optional fused update.

    Its variable is ``embedding[num_embeddings, features]``, in ``params`` or, with an
    ``optimizer``, in ``_overwrite_with_gradient`` (see `TTEmbed`): only the rows of a batch are
    then read and written by a step.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        bounds, dtype, param_dtype, precision, optimizer, skip_nonfinite,
            stochastic_rounding, max_gradient, axis_name, method, promote_dtype: as in `TTEmbed`.
        embedding_init: as in `EmbedBag`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jax_tt.linen
        >>> layer = jax_tt.linen.Embed(1000, 16)
        >>> ids = jnp.array([[17, 4], [999, 0]])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> layer.apply(variables, ids).shape
        (2, 2, 16)
    """

    promote_dtype: Callable[..., Any] = dtypes.promote_dtype
