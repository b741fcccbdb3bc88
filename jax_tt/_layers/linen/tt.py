"""Linen layers whose table is a tensor train."""

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
from jax_tt._layers.pretrained import TTFromPretrained
from jax_tt._ops.describe import tt_table
from jax_tt._sets.row_cache import RowCache
from jax_tt._table.table import Table
from jax_tt._table.wrapper import find, innermost
from jax_tt._tt.initial_cores import CoreInit
from jax_tt._tt.shape import TTShape


class TTLayer(TTFromPretrained, FactoryModule, kw_only=True):
    """What `TTEmbed` and `TTEmbedBag` share."""

    _factory = staticmethod(tt_table)
    tt_ranks: int | Sequence[int] = 32
    row_factors: Sequence[int] | None = None
    col_factors: Sequence[int] | None = None
    core_init: CoreInit = "approx-normal"
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
    """Embedding table stored as a tensor train; a drop-in for ``nn.Embed``.

    A table of ``num_embeddings`` rows and ``features`` columns is stored as ``d`` small cores of
    shape ``[p_k, r_k, q_k, r_{k+1}]``, variables ``core_0`` to ``core_{d-1}``; the dense table is never built.
    They are in the collection ``params`` or, with an ``optimizer``, together with its state in
    ``_overwrite_with_gradient``, which `TrainState` keeps apart from ``params`` and overwrites with its next values.

    Attributes:
        num_embeddings, features, tt_ranks, row_factors, col_factors, dtype, param_dtype, skip_nonfinite,
            stochastic_rounding, max_gradient, axis_name, method, precision: as in `jax_tt.TTEmbed`.
        bounds: treatment of ids outside ``[0, N)``.  ``"warn"`` reads zeros and trains nothing; such
            ids are reported once, as an `OutOfRangeWarning`, and counted by ``apply`` if the
            collection ``out_of_range`` is mutable.  ``"zero"`` does the same silently, and
            ``"clip"`` reads the nearest row.  ``"error"`` raises on CPU (NaN rows elsewhere); if
            buffers are donated, no parameter can be read after the error.  ``"unchecked"`` assumes
            that there are no such ids.  Negative ids are out of range; they do not wrap around.
        core_init: ``"approx-normal"``, ``"approx-uniform"``, ``"normal"`` or ``"uniform"``, each
            giving *table entries* of variance ``1 / (3 N)``; or an initialiser
            ``(key, core_shape, dtype) -> core`` called for every core, which may be boxed, e.g. by
            ``nn.with_partitioning``.
        core_partitioning: wraps the initialiser of every core, also one given by name, e.g.
            ``functools.partial(nn.with_partitioning, names=(None, None, "model", None))``.
        optimizer: None for ordinary parameters updated by optax, or an optimizer of
            ``jax_tt.optimizers`` to fuse the update into the backward pass.
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
    """Pooled embeddings: one vector per bag of ids, from a table stored as a tensor train.

    Attributes:
        num_embeddings, features, tt_ranks, row_factors, col_factors, bounds, dtype, param_dtype,
            core_init, core_partitioning, optimizer, cache, id_order, skip_nonfinite,
            stochastic_rounding, max_gradient, axis_name, method, precision: as in `TTEmbed`.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"``, as in `jax_tt.TTEmbedBag`.

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
