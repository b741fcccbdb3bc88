"""`Embed`, `EmbedBag`, `TTEmbed` and `TTEmbedBag` for NNX."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jax_tt._layers.nnx.module import read_state
from jax_tt._layers.nnx.table import FactoryModule, TableEmbed, TableEmbedBag, with_signature
from jax_tt._layers.pretrained import DenseFromPretrained, TTFromPretrained
from jax_tt._ops.describe import dense_table, tt_table
from jax_tt._table.wrapper import innermost


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


class TTLayer(TTFromPretrained, FactoryModule):
    """What `TTEmbed` and `TTEmbedBag` share."""

    _factory = staticmethod(tt_table)
    _metadata_argument = "core_metadata"

    @property
    def cores(self) -> tuple[jax.Array, ...]:
        """The cores ``[p_k, r_k, q_k, r_{k+1}]``, as the functional ops take them."""
        return innermost(self.table).spec.params(read_state(self))


@with_signature
class TTEmbed(TTLayer, TableEmbed):
    """Embedding table stored as a tensor train; a drop-in for ``nnx.Embed``.

    A table of ``num_embeddings`` rows and ``features`` columns is stored as ``d`` small cores, parameters ``core_0``
    to ``core_{d-1}`` of shape ``[p_k, r_k, q_k, r_{k+1}]``; the dense table is never built.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        tt_ranks: one integer, or the ``d - 1`` ranks between the cores.  Higher ranks give a better
            approximation at a higher cost; ranks above the useful maximum are clipped.
            Ranks with which the cores have as many entries as the dense table are an error, unless it has
            at most ``2**20``, which take 4 MiB in float32.
        row_factors: ``d`` integers (2 to 5 of them) with a product of at least N, or None for
            suggested factors.
        col_factors: ``d`` integers with a product of exactly D, or None.
        bounds: treatment of ids outside ``[0, N)``.  ``"warn"`` reads zeros and trains nothing; such
            ids are counted in training, in the variable `OutOfRange`, and reported once, as an
            `OutOfRangeWarning`.  ``"zero"`` does the same silently, and ``"clip"`` reads the nearest
            row.  ``"error"`` raises on CPU (NaN rows elsewhere); under ``nnx.jit``, or with donated
            buffers, no parameter of the model can be read after the error.  ``"unchecked"`` assumes
            that there are no such ids.  Negative ids are out of range; they do not wrap around.
        dtype: type of the rows returned (default: the type of the cores).  Rows are computed in
            float32 or better and cast once.
        param_dtype: type of the stored cores.
        precision: of the products of float32 cores on a GPU, as in ``nnx.Linear``.  None means
            `jax.default_matmul_precision`, or full precision if that is not set.
        core_init: ``"approx-normal"``, ``"approx-uniform"``, ``"normal"`` or ``"uniform"``, each
            giving *table entries* of the deviation ``stddev``; or an initialiser
            ``(key, core_shape, dtype) -> core`` called for every core, which may be wrapped in
            ``nnx.with_partitioning``.
        stddev: standard deviation of the initial table entries with a named ``core_init``. The default is that of
            ``nnx.Embed``, ``1 / sqrt(D)``: rows of about unit length.
        promote_dtype: as in ``nnx.Embed``, with the same default; called with ``(rows,)`` by ``__call__`` and with
            ``(query, *cores)`` by ``attend``.
        optimizer: None for ordinary parameters updated by optax, or an optimizer of
            ``jax_tt.optimizers`` to fuse the update into the backward pass; use `FusedOptimizer`
            then.  A field that is an ``nnx.Variable`` of a scalar becomes a variable of the layer,
            ``hyperparameters[name]``, which may be set between steps.
        cache: a `RowCache` for hot rows, or None.  Calls count ids until ``model.eval()``;
            `FusedOptimizer.update` and `refresh_caches` refresh the cache when it is due.
        id_order: an `IdOrder` from ids to rows of the table, or None if ids are rows.  It is stored in
            the variable `IdOrderState`, 2 to 4 bytes per id.
        skip_nonfinite: fused only; a step whose gradient is not finite leaves the table unchanged.
        stochastic_rounding: fused 16-bit cores only; round updates stochastically.
        max_gradient: fused only; limit of the absolute value of every element of the gradient of what the
            layer returns, as in `Update`.
        axis_name: mesh axes to sum the table's gradients over, inside a ``shard_map`` with
            ``check_vma=False``.
        method: ``"auto"``, ``"reference"`` (pure JAX) or ``"native"`` (native).
        name: the table's name in error messages (default: class and sizes).
        rngs: random number generators; the cores take one key of ``params``.
        core_metadata: metadata for the core variables, e.g. ``{"out_sharding": (...)}`` with four
            axis names.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TTEmbed(50_000, 64, tt_ranks=8, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[1, 2, 3], [4, 5, 49_999]])).shape
        (2, 3, 64)
        >>> layer.attend(jnp.ones((2, 64))).shape
        (2, 50000)
        >>> layer.tt_shape.d, layer.tt_shape.ranks
        (3, (8, 8))
    """


@with_signature
class TTEmbedBag(TTLayer, TableEmbedBag):
    """Pooled embeddings: one vector per bag of ids, from a table stored as a tensor train.

    Args:
        num_embeddings, features, tt_ranks, row_factors, col_factors, bounds, dtype, param_dtype,
            precision, core_init, optimizer, cache, id_order, skip_nonfinite, stochastic_rounding,
            max_gradient, axis_name, method, name, rngs, core_metadata: as in `TTEmbed`.
        stddev: as in `TTEmbed`, with the default ``1 / sqrt(3 N)``, which is usual for recommenders.
        combiner: ``"sum"``; ``"mean"`` divides by the number of ids, or the sum of their weights;
            ``"sqrtn"`` by the root of the number, or of the sum of squared weights; ``"mean_count"``
            always by the number of ids; ``"max"`` is the maximum of each column and takes no weights.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TTEmbedBag(1_000_000, 64, tt_ranks=8, combiner="mean", rngs=nnx.Rngs(0))
        >>> bags = jax_tt.Bags.from_ragged([[17, 4], [], [999_999]])
        >>> layer(bags).shape
        (3, 64)

        A step that updates the table in the backward pass:

        >>> import optax
        >>> adagrad = jax_tt.optimizers.Adagrad(learning_rate=0.05)
        >>> layer = jax_tt.TTEmbedBag(1_000_000, 64, tt_ranks=8, optimizer=adagrad, rngs=nnx.Rngs(0))
        >>> opt = jax_tt.FusedOptimizer(layer, optax.adam(1e-3))
        >>> grads = jax_tt.grad(lambda layer: layer(bags).sum())(layer)
        >>> _ = opt.update(layer, grads)
    """
