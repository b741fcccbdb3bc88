"""`Embed`, `EmbedBag`, `TTEmbed` and `TTEmbedBag` for linen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.linen import dtypes

from jax_tt._ids.id_order import IdOrder
from jax_tt._kinds.cached.table import RowCachedTable
from jax_tt._kinds.ordered.table import OrderedTable
from jax_tt._layers.linen.table import EmbedBagModule, EmbedModule, FactoryModule
from jax_tt._layers.pretrained import DenseFromPretrained, TTFromPretrained
from jax_tt._ops.describe import dense_table, tt_table
from jax_tt._sets.row_cache import RowCache
from jax_tt._table.initial_rows import default_embedding_init
from jax_tt._table.table import Table
from jax_tt._table.wrapper import find, innermost
from jax_tt._tt.initial_cores import CoreInit
from jax_tt._tt.shape import TTShape


class DenseLayer(DenseFromPretrained, FactoryModule, kw_only=True):
    """What `Embed` and `EmbedBag` share."""

    _factory = staticmethod(dense_table)
    embedding_init: Callable[..., Any] = default_embedding_init

    @nn.nowrap
    def _rebuilt(self, before: Table, after: Table) -> Any:
        if type(after) is not type(before):
            return super()._rebuilt(before, after)
        dense: Any = after
        return self.clone(num_embeddings=dense.num_embeddings, embedding_init=dense.embedding_init)

    @property
    def embedding(self) -> jax.Array:
        """The table ``[num_embeddings, features]``."""
        return self.state["embedding"]


class EmbedBag(DenseLayer, EmbedBagModule, kw_only=True):
    """`jax_tt.EmbedBag` for linen: pooled embeddings from a dense table.

    Its variable is ``embedding[num_embeddings, features]``, in ``params`` or, with an ``optimizer``, in
    ``_overwrite_with_gradient`` (see `TTEmbed`): only the rows of a batch are then read and written by a step.

    Attributes:
        num_embeddings, features, combiner: as in `jax_tt.EmbedBag`.
        bounds, dtype, param_dtype, precision, optimizer, skip_nonfinite, stochastic_rounding, max_gradient, axis_name,
            method: as in `TTEmbed`.
        embedding_init: as in `jax_tt.EmbedBag`; may be boxed, e.g. by ``nn.with_partitioning``, and slots of the same
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
    """`jax_tt.Embed` for linen: ``nn.Embed`` with checked ids and an optional fused update.

    It has the variable and the attributes of `EmbedBag`, except for ``combiner``.

    Attributes:
        promote_dtype: as in `TTEmbed`.

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


class TTLayer(TTFromPretrained, FactoryModule, kw_only=True):
    """What `TTEmbed` and `TTEmbedBag` share."""

    _factory = staticmethod(tt_table)
    tt_ranks: int | Sequence[int] = 32
    row_factors: Sequence[int] | None = None
    col_factors: Sequence[int] | None = None
    core_init: CoreInit = "approx-normal"
    stddev: float | None = None
    core_partitioning: Callable[..., Any] | None = None
    cache: RowCache | None = None
    id_order: IdOrder | None = None

    @nn.nowrap
    def _rebuilt(self, before: Table, after: Table) -> Any:
        train = innermost(after)
        if type(train) is not type(innermost(before)):
            return super()._rebuilt(before, after)
        ordered, cached = find(after, OrderedTable), find(after, RowCachedTable)
        return self.clone(
            **train.shape.layer_arguments(),
            id_order=None if ordered is None else ordered.id_order,
            cache=None if cached is None else cached.cache,
            core_init=train.core_init,
            stddev=None,
        )

    @nn.nowrap
    def _box(self, init: Callable[..., Any]) -> Callable[..., Any]:
        return init if self.core_partitioning is None else self.core_partitioning(init)

    @property
    def tt_shape(self) -> TTShape:
        """Sizes of the tensor train."""
        return innermost(self._described()).shape

    @property
    def cores(self) -> tuple[jax.Array, ...]:
        """The cores ``[p_k, r_k, q_k, r_{k+1}]``, as the functional ops take them."""
        return innermost(self.described).spec.params(self.state)


class TTEmbed(TTLayer, EmbedModule, kw_only=True):
    """`jax_tt.TTEmbed` for linen: an embedding table stored as a tensor train, a drop-in for ``nn.Embed``.

    The cores, variables ``core_0`` to ``core_{d-1}``, are in the collection ``params`` or, with an ``optimizer``,
    together with its state in ``_overwrite_with_gradient``, which `TrainState` keeps apart from ``params`` and
    overwrites with its next values.

    Attributes:
        num_embeddings, features, tt_ranks, row_factors, col_factors, dtype, param_dtype, stddev, optimizer,
            skip_nonfinite, stochastic_rounding, max_gradient, axis_name, method, precision: as in `jax_tt.TTEmbed`.
        bounds: as in `jax_tt.TTEmbed`; with ``"warn"``, ``apply`` counts ids out of range if the collection
            ``out_of_range`` is mutable.
        core_init: as in `jax_tt.TTEmbed`; an initialiser may be boxed, e.g. by ``nn.with_partitioning``.
        core_partitioning: wraps the initialiser of every core, also one given by name, e.g.
            ``functools.partial(nn.with_partitioning, names=(None, None, "model", None))``.
        cache: a `RowCache` for hot rows, or None.  ``apply`` counts ids if the collection
            ``row_cache`` is mutable; call `refresh_caches` after each step.
        id_order: an `IdOrder` from ids to rows of the table, or None if ids are rows.  It is stored in
            the collection ``id_order``, 2 to 4 bytes per id.
        promote_dtype: as in ``nn.Embed``; called with ``rows`` by ``__call__`` and with
            ``query, *cores`` by ``attend``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(50_000, 64, tt_ranks=8)
        >>> ids = jnp.array([[1, 2, 3], [4, 5, 49_999]])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> sorted(variables["params"])
        ['core_0', 'core_1', 'core_2']
        >>> layer.apply(variables, ids).shape
        (2, 3, 64)
        >>> layer.apply(variables, jnp.ones((2, 64)), method="attend").shape
        (2, 50000)
    """

    promote_dtype: Callable[..., Any] = dtypes.promote_dtype


class TTEmbedBag(TTLayer, EmbedBagModule, kw_only=True):
    """`jax_tt.TTEmbedBag` for linen: one vector per bag of ids, from a table stored as a tensor train.

    Attributes:
        combiner, stddev: as in `jax_tt.TTEmbedBag`. The others are as in `TTEmbed`, which alone has ``promote_dtype``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
        >>> import jax_tt
        >>> class Tower(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, bags):
        ...         adagrad = jax_tt.optimizers.Adagrad(learning_rate=0.05)
        ...         rows = jax_tt.linen.TTEmbedBag(1_000_000, 64, tt_ranks=8, optimizer=adagrad)(bags)
        ...         return nn.Dense(1)(rows)
        >>> bags = jax_tt.Bags.from_ragged([[17, 4], [], [999_999]])
        >>> model = Tower()
        >>> variables = model.init(jax.random.key(0), bags)
        >>> sorted(variables)
        ['_overwrite_with_gradient', 'params']
        >>> state = jax_tt.linen.TrainState.create(
        ...     apply_fn=model.apply, variables=variables, tx=optax.adam(1e-3)
        ... )
        >>> loss_fn = jax_tt.linen.value_and_grad(lambda v: jnp.mean(model.apply(v, bags) ** 2))
        >>> loss, grads = loss_fn(state.variables)
        >>> state = state.apply_gradients(grads=grads)
        >>> float(state.fused["TTEmbedBag_0"]["step"])
        1.0
    """

    combiner: str = "sum"
