"""NNX layers whose table is a tensor train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jax_tt._bags import Bags
from jax_tt._cache.config import RowCache
from jax_tt._init import CoreInit
from jax_tt._layers import _calls
from jax_tt._layers._cached import check_cache
from jax_tt._layers._initial import fresh_cores, fresh_init
from jax_tt._layers._names import core_names
from jax_tt._layers._nnx_change import ChangingModule
from jax_tt._layers._nnx_variables import IdOrderState
from jax_tt._layers._options import check_id_order, check_options, table_shape
from jax_tt._layers._pretrained import TTFromPretrained
from jax_tt._ops._canonical import check_combiner
from jax_tt._ops._table import FusedTable
from jax_tt._split_ids import SplitIds
from jax_tt.optimizers import Optimizer
from jax_tt.order import IdOrder
from jax_tt.order._stored import StoredRows, of_layer, on_device


class TTModule(TTFromPretrained, ChangingModule):
    """A table held as cores ``core_0 ... core_{d-1}``; what `TTEmbed` and `TTEmbedBag` share."""

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        tt_ranks: int | Sequence[int],
        row_factors: Sequence[int] | None,
        col_factors: Sequence[int] | None,
        bounds: str,
        dtype: Any,
        param_dtype: Any,
        precision: jax.lax.PrecisionLike,
        core_init: CoreInit,
        optimizer: Optimizer | None,
        cache: RowCache | None,
        id_order: IdOrder | None,
        skip_nonfinite: bool,
        stochastic_rounding: bool,
        axis_name: Any,
        method: str,
        name: str | None,
        rngs: nnx.Rngs,
        core_metadata: Mapping[str, Any],
    ) -> None:
        self._set_optimizer(optimizer)
        check_options(
            bounds=bounds,
            method=method,
            optimizer=self.optimizer,
            param_dtype=param_dtype,
            precision=precision,
        )
        self.tt_shape = table_shape(num_embeddings, features, tt_ranks, row_factors, col_factors)
        self.num_embeddings = self.tt_shape.num_embeddings
        self.features = self.tt_shape.features
        self.bounds = bounds
        self.param_dtype = param_dtype
        self.precision = precision
        self.core_init = fresh_init(core_init)
        check_cache(cache, self.num_embeddings)
        self.cache = cache
        check_id_order(id_order, self.num_embeddings)
        self.skip_nonfinite = skip_nonfinite
        self.stochastic_rounding = stochastic_rounding
        self.axis_name = axis_name
        self.method = method
        self.name = name
        names = core_names(self.tt_shape.d)
        cores = fresh_cores(rngs.params(), self.tt_shape, core_init, param_dtype)
        self._create(dict(zip(names, cores, strict=True)), self.tt_shape.core_shapes, core_metadata)
        self.dtype = self.cores[0].dtype if dtype is None else dtype
        self._create_cache(self.cores[0].dtype)
        self.id_order = None if id_order is None else IdOrderState(on_device(id_order.rows))

    @property
    def cores(self) -> tuple[jax.Array, ...]:
        """The cores ``[p_k, r_k, q_k, r_{k+1}]``, as the functional ops take them."""
        return self._read(core_names(self.tt_shape.d))

    @property
    def stored_rows(self) -> StoredRows | None:
        """The row of every id, or None where ids are rows."""
        return None if self.id_order is None else of_layer(self.id_order[...], self.num_embeddings)

    def _table(self) -> tuple[jax.Array, ...] | FusedTable:
        return self.cores if self.optimizer is None else self._fused(core_names(self.tt_shape.d))


class TTEmbed(TTModule):
    """Embedding table held as a tensor train; a drop-in for ``nnx.Embed``.

    A table of ``num_embeddings`` rows and ``features`` columns is stored as ``d`` small cores,
    parameters ``core_0`` to ``core_{d-1}`` of shape ``[p_k, r_k, q_k, r_{k+1}]``, and never built.

    Args:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        tt_ranks: one integer, or the ``d - 1`` ranks between the cores.  The table approximates
            better and costs more with higher ranks; ranks above the useful maximum are clipped.
        row_factors: ``d`` integers (2 to 5 of them) with a product of at least N, or None to have
            them suggested.
        col_factors: ``d`` integers with a product of exactly D, or None.
        bounds: what an id outside ``[0, N)`` does.  ``"warn"`` reads zeros and trains nothing; such
            ids are counted in training, in the variable `OutOfRange`, and reported once, as an
            `OutOfRangeWarning`.  ``"zero"`` does the same without a word, and ``"clip"`` reads the
            nearest row.  ``"error"`` raises on CPU (NaN rows elsewhere), at the price of the
            model: under ``nnx.jit``, or with donated buffers, none of its parameters can be read
            after the error.  ``"unchecked"`` promises that there is no such id.  Negative ids are
            out of range, they do not wrap around.
        dtype: type of the rows returned (default: that of the cores).  Rows are computed in
            float32 or better and cast once.
        param_dtype: type the cores are stored in.
        precision: of the products of float32 cores on a GPU, as in ``nnx.Linear``, whose None means
            `jax.default_matmul_precision`; full where that is not set.
        core_init: ``"approx-normal"``, ``"approx-uniform"``, ``"normal"`` or ``"uniform"``, each
            giving *table entries* of variance ``1 / (3 N)``; or an initialiser
            ``(key, core_shape, dtype) -> core`` called for every core, which may be wrapped in
            ``nnx.with_partitioning``.
        promote_dtype: as in ``nnx.Embed``; called with ``(rows,)`` by ``__call__`` and with
            ``(query, *cores)`` by ``attend``.
        optimizer: None for ordinary parameters that optax steps, or a rule of
            ``jax_tt.optimizers`` to have the update fused into the backward pass; step the model
            with `FusedOptimizer` then.  A field that is an ``nnx.Variable`` of a scalar becomes a variable
            of the layer, ``hyperparameters[name]``, which may be set between steps.
        cache: a `RowCache` for hot rows, or None.  Calls count what they are asked for until
            ``model.eval()``; `FusedOptimizer.update` or `refresh_caches` refresh it when due.
        id_order: an `IdOrder` from ids to rows of the table, or None where ids are rows.  It is kept in
            a variable of its own, `IdOrderState`, 2 to 4 bytes an id; callers see ids only.
        skip_nonfinite: fused only; a step whose gradient is not finite leaves the table as it is.
        stochastic_rounding: fused 16-bit cores only; round updates stochastically.
        axis_name: mesh axes to sum the table's gradients over, inside a ``shard_map`` with
            ``check_vma=False``.
        method: ``"auto"``, ``"reference"`` (pure JAX) or ``"ffi"`` (native).
        name: the table's name in error messages (default: class and sizes).
        rngs: random number generators; the cores take one key of ``params``.
        core_metadata: metadata for the core variables, e.g. ``{"out_sharding": (...)}`` with four
            axis names.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

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

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        tt_ranks: int | Sequence[int] = 32,
        row_factors: Sequence[int] | None = None,
        col_factors: Sequence[int] | None = None,
        bounds: str = "warn",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        core_init: CoreInit = "approx-normal",
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        optimizer: Optimizer | None = None,
        cache: RowCache | None = None,
        id_order: IdOrder | None = None,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = True,
        axis_name: Any = None,
        method: str = "auto",
        name: str | None = None,
        rngs: nnx.Rngs,
        core_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            num_embeddings,
            features,
            tt_ranks=tt_ranks,
            row_factors=row_factors,
            col_factors=col_factors,
            bounds=bounds,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            core_init=core_init,
            optimizer=optimizer,
            cache=cache,
            id_order=id_order,
            skip_nonfinite=skip_nonfinite,
            stochastic_rounding=stochastic_rounding,
            axis_name=axis_name,
            method=method,
            name=name,
            rngs=rngs,
            core_metadata=core_metadata,
        )
        self.promote_dtype = promote_dtype

    def __call__(
        self,
        inputs: jax.Array | SplitIds,
        out_sharding: Any = None,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Looks ids up.

        Args:
            inputs: integers of any shape, or `SplitIds` (which an ``id_order`` does not take).
            out_sharding: sharding of the result under a mesh with explicit axes.
            grad_scale: fused only; the factor the loss is multiplied with, divided out of the
                table's gradient inside the op.
            hyperparameters: fused only; fields of ``optimizer`` for this call, floats or traced scalars by name,
                e.g. ``{"learning_rate": rate}``.

        Returns:
            ``[*inputs.shape, features]``.

        Raises:
            ValueError: ``inputs`` are not integers.
        """
        self._count_out_of_range(inputs, self.tt_shape)
        inputs = _calls.rows_of_ids(self, inputs)
        update = _calls.Update(grad_scale, hyperparameters)

        def rows(table: Any, ids: Any) -> jax.Array:
            return _calls.lookup(self, table, ids, update)

        if self.cache is None:
            result = _calls.with_out_sharding(rows, out_sharding)(self._table(), inputs)
        else:
            table = self._cached_table(self._table())
            result, directory = _calls.cached_lookup(self, table, inputs, update)
            result = _calls.resharded(result, out_sharding)
            self._keep(directory)
        (result,) = self.promote_dtype((result,), dtype=self.dtype, inexact=False)
        return result

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
        if self.cache is not None:
            table = self._cached_table(self.cores)
            query, rows, *cores = self.promote_dtype(
                (query, table.values, *table.cores), dtype=self.dtype
            )
            tags = table.directory.tags
            result = _calls.cached_attend(self, tuple(cores), rows, tags, query)
            return _calls.by_id(self, _calls.resharded(result, out_sharding))
        query, *cores = self.promote_dtype((query, *self.cores), dtype=self.dtype)

        def scores(cores: Any, query: jax.Array) -> jax.Array:
            return _calls.attend(self, cores, query)

        result = _calls.with_out_sharding(scores, out_sharding)(tuple(cores), query)
        return _calls.by_id(self, result)


class TTEmbedBag(TTModule):
    """Pooled embeddings: one vector per bag of ids, from a table held as a tensor train.

    Args:
        num_embeddings, features, tt_ranks, row_factors, col_factors, bounds, dtype, param_dtype,
            precision, core_init, optimizer, cache, id_order, skip_nonfinite, stochastic_rounding, axis_name,
            method, name, rngs, core_metadata: as in `TTEmbed`.
        combiner: ``"sum"``; ``"mean"`` divides by the number of ids, or the sum of their weights;
            ``"sqrtn"`` by the root of the number, or of the sum of squared weights; ``"mean_count"``
            by the number of ids, weights or not; ``"max"`` is the maximum of each column and takes no
            weights.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

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
        >>> grads = nnx.grad(lambda layer: layer(bags).sum())(layer)
        >>> _ = opt.update(layer, grads)
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        tt_ranks: int | Sequence[int] = 32,
        row_factors: Sequence[int] | None = None,
        col_factors: Sequence[int] | None = None,
        combiner: str = "sum",
        bounds: str = "warn",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        core_init: CoreInit = "approx-normal",
        optimizer: Optimizer | None = None,
        cache: RowCache | None = None,
        id_order: IdOrder | None = None,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = True,
        axis_name: Any = None,
        method: str = "auto",
        name: str | None = None,
        rngs: nnx.Rngs,
        core_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.combiner = check_combiner(combiner)
        super().__init__(
            num_embeddings,
            features,
            tt_ranks=tt_ranks,
            row_factors=row_factors,
            col_factors=col_factors,
            bounds=bounds,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            core_init=core_init,
            optimizer=optimizer,
            cache=cache,
            id_order=id_order,
            skip_nonfinite=skip_nonfinite,
            stochastic_rounding=stochastic_rounding,
            axis_name=axis_name,
            method=method,
            name=name,
            rngs=rngs,
            core_metadata=core_metadata,
        )

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
        self._count_out_of_range(bags, self.tt_shape)
        bags = _calls.rows_of_bags(self, bags)
        update = _calls.Update(grad_scale, hyperparameters)
        if self.cache is None:
            return _calls.tt_bag(self, self._table(), bags, self.combiner, update)
        table = self._cached_table(self._table())
        result, directory = _calls.cached_bag(self, table, bags, self.combiner, update)
        self._keep(directory)
        return result
