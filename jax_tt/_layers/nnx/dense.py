"""NNX layers whose table is dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_tt._kinds.dense.table import DenseTable
from jax_tt._layers.nnx.hash import HashedModule
from jax_tt._layers.nnx.module import hoisted_update
from jax_tt._layers.nnx.table import TableEmbed, TableEmbedBag
from jax_tt._layers.options import bags_of
from jax_tt._layers.pretrained import DenseFromPretrained
from jax_tt._table.initial_rows import default_embedding_init
from jax_tt._table.options import Lookup
from jax_tt.optimizers import Optimizer


class DenseLayer(DenseFromPretrained, HashedModule):
    """The constructor shared by `Embed` and `EmbedBag`."""

    embedding: nnx.Variable[Any]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        bounds: str = "warn",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        promote_dtype: Callable[..., Any] | None = None,
        embedding_init: Callable[..., Any] = default_embedding_init,
        optimizer: Optimizer | None = None,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = True,
        max_gradient: float | None = None,
        axis_name: Any = None,
        method: str = "auto",
        name: str | None = None,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        update, variables = hoisted_update(
            optimizer, skip_nonfinite, stochastic_rounding, max_gradient
        )
        table = DenseTable(
            num_embeddings, features, param_dtype, update, name, embedding_init=embedding_init
        )
        super().__init__(
            table,
            Lookup("sum", bounds, dtype, None, method, axis_name),
            rngs=rngs,
            metadata=embedding_metadata,
            hyperparameters=variables,
            **({} if promote_dtype is None else {"promote_dtype": promote_dtype}),
        )


class EmbedBag(DenseLayer, TableEmbedBag):
    """Pooled embeddings from a dense table: ``nnx.Embed`` for bags.

    Its parameter is ``embedding[num_embeddings, features]``.  With an ``optimizer`` only the rows
    of a batch are read and written by a step; without one the gradient is as large as the table.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"``, as in `TTEmbedBag`.
        bounds, dtype, param_dtype, optimizer, skip_nonfinite, stochastic_rounding,
            max_gradient, axis_name, method, name, rngs: as in `TTEmbed`.
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

    @bags_of(DenseLayer.__init__)
    def __init__(
        self, num_embeddings: int, features: int, *, combiner: str = "sum", **options: Any
    ) -> None:
        super().__init__(num_embeddings, features, **options)
        self.combiner = combiner


class Embed(DenseLayer, TableEmbed):
    """Rows of a dense table: ``nnx.Embed`` with checked ids and an optional fused update.

    Its parameter is ``embedding[num_embeddings, features]``.  With an ``optimizer`` only the rows
    of a batch are read and written by a step; without one the gradient is as large as the table.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        bounds, dtype, param_dtype, promote_dtype, optimizer, skip_nonfinite, stochastic_rounding,
            max_gradient, axis_name, method, name, rngs: as in `TTEmbed`.
        embedding_init: initialiser ``(key, shape, dtype) -> table`` (default: that of
            ``nnx.Embed``); may be wrapped in ``nnx.with_partitioning``.
        embedding_metadata: metadata for the table's variable, and for slots of its shape.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.Embed(1000, 16, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[17, 4], [999, 0]])).shape, layer.attend(jnp.ones((2, 16))).shape
        ((2, 2, 16), (2, 1000))
    """
