"""Linen layers whose table is dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dtypes

from jax_tt._kinds.dense.table import DenseTable
from jax_tt._layers.linen.table import EmbedBagModule, EmbedModule, TableModule
from jax_tt._layers.pretrained import DenseFromPretrained
from jax_tt._ops.describe import described_update
from jax_tt._table.initial_rows import default_embedding_init
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table
from jax_tt.optimizers import Optimizer


class DenseLayer(DenseFromPretrained, TableModule):
    """Attributes shared by `Embed` and `EmbedBag`."""

    num_embeddings: int
    features: int
    bounds: str = "warn"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = default_embedding_init
    optimizer: Optimizer | None = None
    skip_nonfinite: bool = False
    stochastic_rounding: bool = True
    max_gradient: float | None = None
    axis_name: Any = None
    method: str = "auto"

    @nn.nowrap
    def _describe(self) -> tuple[Table, Lookup]:
        update = described_update(
            self.optimizer, self.skip_nonfinite, self.stochastic_rounding, self.max_gradient
        )
        table = DenseTable(
            self.num_embeddings,
            self.features,
            self.param_dtype,
            update,
            embedding_init=self.embedding_init,
        )
        options = self.bounds, self.dtype, None, self.method, self.axis_name
        return table, Lookup(getattr(self, "combiner", "sum"), *options)

    @property
    def embedding(self) -> jax.Array:
        """The table ``[num_embeddings, features]``."""
        return self.state["embedding"]


class EmbedBag(DenseLayer, EmbedBagModule):
    """Pooled embeddings from a dense table: ``nn.Embed`` for bags.

    Its variable is ``embedding[num_embeddings, features]``, in ``params`` or, with an
    ``optimizer``, in ``_overwrite_with_gradient`` (see `TTEmbed`): only the rows of a batch are
    then read and written by a step.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"``, as in `TTEmbedBag`.
        bounds, dtype, param_dtype, optimizer, skip_nonfinite, stochastic_rounding,
            max_gradient, axis_name, method: as in `TTEmbed`.
        embedding_init: initialiser ``(key, shape, dtype) -> table`` (default: that of
            ``nn.Embed``); may be boxed, e.g. by ``nn.with_partitioning``, and slots of the same
            shape are boxed like it.

    Raises:
        ValueError, TypeError: in ``init`` or ``apply``: an attribute does not fit; the message
            names it and the fix.

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


class Embed(DenseLayer, EmbedModule):
    """Rows of a dense table: ``nn.Embed`` with checked ids and an optional fused update.

    Its variable is ``embedding[num_embeddings, features]``, in ``params`` or, with an
    ``optimizer``, in ``_overwrite_with_gradient`` (see `TTEmbed`): only the rows of a batch are
    then read and written by a step.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        bounds, dtype, param_dtype, optimizer, skip_nonfinite, stochastic_rounding,
            max_gradient, axis_name, method, promote_dtype: as in `TTEmbed`.
        embedding_init: as in `EmbedBag`.

    Raises:
        ValueError, TypeError: in ``init`` or ``apply``: an attribute does not fit; the message
            names it and the fix.

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
