"""NNX layers whose table is dense."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jax_tt._layers.nnx.arguments import FactoryModule, with_signature
from jax_tt._layers.nnx.table import TableEmbed, TableEmbedBag
from jax_tt._layers.pretrained import DenseFromPretrained
from jax_tt._ops.describe import dense_table


class DenseLayer(DenseFromPretrained, FactoryModule):
    """What `Embed` and `EmbedBag` share."""

    _factory = staticmethod(dense_table)
    _metadata_argument = "embedding_metadata"
    embedding: nnx.Variable[Any]


@with_signature
class EmbedBag(DenseLayer, TableEmbedBag):
    """Pooled embeddings from a dense table: ``nnx.Embed`` for bags.

    Its parameter is ``embedding[num_embeddings, features]``.  With an ``optimizer`` only the rows
    of a batch are read and written by a step; without one the gradient is as large as the table.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"``, as in `TTEmbedBag`.
        bounds, dtype, param_dtype, precision, optimizer, skip_nonfinite, stochastic_rounding, max_gradient, axis_name,
            method, name, rngs: as in `TTEmbed`.
        embedding_init: initialiser ``(key, shape, dtype) -> table`` (default: that of
            ``nnx.Embed``); may be wrapped in ``nnx.with_partitioning``.
        embedding_metadata: metadata for the table's variable, and for slots of its shape.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.EmbedBag(1000, 16, combiner="mean", rngs=nnx.Rngs(0))
        >>> layer(jax_tt.Bags.from_ragged([[17, 4], [], [999]])).shape
        (3, 16)
    """


@with_signature
class Embed(DenseLayer, TableEmbed):
    """Rows of a dense table: ``nnx.Embed`` with checked ids and an optional fused update.

    Its parameter is ``embedding[num_embeddings, features]``.  With an ``optimizer`` only the rows
    of a batch are read and written by a step; without one the gradient is as large as the table.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        bounds, dtype, param_dtype, precision, promote_dtype, optimizer, skip_nonfinite, stochastic_rounding,
            max_gradient, axis_name, method, name, rngs: as in `TTEmbed`.
        embedding_init, embedding_metadata: as in `EmbedBag`.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.Embed(1000, 16, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[17, 4], [999, 0]])).shape, layer.attend(jnp.ones((2, 16))).shape
        ((2, 2, 16), (2, 1000))
    """
