"""Linen layers of any table: the variables of its state, and its calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen import dtypes
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._base.arguments import type_of
from jax_tt._base.keywords import ChecksKeywords
from jax_tt._collection.host_batch import host_batch
from jax_tt._ids.split_ids import SplitIds
from jax_tt._kinds.cached.names import COLLECTION as ROW_CACHE
from jax_tt._kinds.hashed.table import COLLECTION as HASH_TABLE
from jax_tt._layers.call import (
    BagCalls,
    GivenState,
    attended,
    check_value,
    cross_entropy,
    described,
    for_evaluation,
    scaled_as_embed,
    step_inputs,
)
from jax_tt._layers.pretrained import AnyFromPretrained
from jax_tt._layers.variables import FusedParam
from jax_tt._lookup.calls import lookup_rows
from jax_tt._lookup.rule import OUT_OF_RANGE
from jax_tt._ops.insert_in_call import insert_in_call, with_checked_gradients
from jax_tt._ops.top_k import top_k
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.copies import with_name, without_values
from jax_tt._table.initial_rows import init_param
from jax_tt._table.options import Lookup, StepInputs
from jax_tt._table.table import Table
from jax_tt._table.types import State
from jax_tt._table.wrapper import innermost
from jax_tt.optimizers import Optimizer

COUNT, PARAMS = "count", "params"
# So that `nnx.bridge.ToNNX` makes variables that `FusedOptimizer` overwrites. What else is in the collection, such as
# scales of 8-bit floats, has its next value as its gradient as well.
nnx.register_variable_name(OVERWRITE_WITH_GRADIENT, FusedParam, overwrite=True)


class TableModule(ChecksKeywords, nn.Module):
    """The state of a table in variables, and the common part of its calls.

    Parameters are in the collection ``params`` or, with an ``optimizer``, together with its state in
    ``_overwrite_with_gradient``. The other arrays are in the collections that ``Table.spec`` names.
    """

    @nn.nowrap
    def _describe(self) -> tuple[Table, Lookup]:
        """The description of the table and the options of the calls, from the attributes of the layer."""
        raise NotImplementedError

    def setup(self) -> None:
        table, self.options = self._describe()
        self.described = self._named(table, "/".join(self.path))
        self.state = self._declare()

    @nn.nowrap
    def _described(self, path: str = "") -> Table:
        """The table of the layer at a path of the model."""
        return self._named(self._describe()[0], path)

    @nn.nowrap
    def _named(self, table: Table, path: str) -> Table:
        """The table with the defaults of the layer; its name in error messages is its path in the model."""
        table = self._scaled(table)
        sizes = f"{table.num_embeddings}, {table.features}"
        default = path or f"{type(self).__name__}({sizes})"
        return table if table.name is not None else with_name(table, default)

    @nn.nowrap
    def _scaled(self, table: Table) -> Table:
        """The table with the initial scale that the layer has by default."""
        return table

    @nn.nowrap
    def _rebuilt(self, before: Table, after: Table) -> Any:
        """The layer of a table that has changed between steps."""
        del before
        raise TypeError(
            f"fn: returned {type_of(after)} for {type_of(self)}, which cannot hold it; expected a "
            "layer jax_tt.linen.TableEmbed or TableEmbedBag of the table."
        )

    @property
    def host_batch(self) -> Callable[..., Any]:
        """Prepares ids for a compiled step, as `jax_tt.TableEmbed.host_batch`; it needs no variables."""
        table, lookup = self._describe()
        table, pooled = without_values(self._named(table, "")), isinstance(self, EmbedBagModule)
        return functools.partial(host_batch, table, pooled=pooled, bounds=lookup.bounds)

    @nn.nowrap
    def _given(self) -> GivenState | None:
        """The state that the layer starts with, or None for an initial one."""
        return None

    @nn.nowrap
    def _box(self, init: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps an initialiser so that it returns boxed values."""
        return init

    @nn.nowrap
    def _declare(self) -> dict[str, jax.Array]:
        """The arrays of the table by name; initialisers may return boxed values."""
        table, given = self.described, self._given()

        def initial(key: jax.Array, name: str) -> Any:
            return init_param(table, name, key) if given is None else given.params(table)[name]

        boxed = {
            name: self._first(name, self._box(functools.partial(initial, name=name)))
            for name in innermost(table).spec.param_shapes
        }
        params = {name: nn.meta.unbox(value) for name, value in boxed.items()}
        for name, param in params.items():
            if name not in table.spec.buffers:
                check_value(name, param, table.spec.param_shapes[name])
        fresh = functools.cache(
            lambda: table.init_rest(params) if given is None else given.rest(table)
        )
        rest = {}
        for name in (*table.spec.trained_names, *table.spec.buffers):
            if name in params:
                continue
            if name in table.spec.buffers:
                collection = table.spec.buffers[name]
                rest[name] = self.variable(collection, name, lambda name=name: fresh()[name]).value
                continue

            def init(key: jax.Array, name: str = name) -> Any:
                del key
                value = fresh()[name]
                # Optimizer state of the same shape as a parameter is partitioned like it.
                twins = (box for key, box in boxed.items() if params[key].shape == value.shape)
                return nn.meta.replace_boxed(next(twins, value), value)

            rest[name] = nn.meta.unbox(self._trained(name, init))
        return params | rest

    @nn.nowrap
    def _first(self, name: str, init: Callable[[jax.Array], Any]) -> Any:
        """`_trained`, or value of a parameter without gradient."""
        if name not in self.described.spec.buffers:
            return self._trained(name, init)
        collection = self.described.spec.buffers[name]
        return self.variable(collection, name, lambda: init(self.make_rng("params"))).value

    @nn.nowrap
    def _trained(self, name: str, init: Callable[[jax.Array], Any]) -> Any:
        """Value of a parameter or fused variable; boxed if its initialiser returns a box."""
        if self.described.update is None:
            return self.param(name, init, unbox=False)
        return fused_variable(self, name, lambda: init(self.make_rng("params")))

    @nn.nowrap
    def _call(
        self,
        op: Callable[..., Any],
        inputs: Any,
        grad_scale: Any,
        hyperparameters: Mapping[str, Any] | None,
    ) -> jax.Array:
        before, lookup, step = begin_call(self, grad_scale, hyperparameters)
        state: State = before
        if self.described.ids.takes_keys:
            if self.is_mutable_collection(HASH_TABLE):
                inputs, state = insert_in_call(self.described, before, inputs, lookup)
            else:
                state = with_checked_gradients(self.described, before, lookup)
        result, after = op(self.described, state, inputs, lookup, step)
        finish_call(self, before, after, lookup)
        return result


# Functions, and helper methods without a wrapper: `nn.tabulate` lists the first wrapped method that is called.


def begin_call(
    layer: TableModule, grad_scale: Any, hyperparameters: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Lookup, StepInputs]:
    """Returns the state, the options and the inputs of the update for a call of a layer."""
    step = step_inputs(layer.described, grad_scale, hyperparameters, {})
    # A call without training does not count in a row cache, and reads unknown keys as in serving.
    training = any(map(layer.is_mutable_collection, (ROW_CACHE, HASH_TABLE)))
    initializing = layer.is_initializing()
    lookup = layer.options if training and not initializing else for_evaluation(layer.options)
    state = dict(layer.state)
    # Not in `init`: a `TrainState` takes its whole result, and holds no counts.
    counts = lookup.bounds == "warn" and not initializing
    if counts and layer.is_mutable_collection(OUT_OF_RANGE):
        state[OUT_OF_RANGE] = layer.get_variable(OUT_OF_RANGE, COUNT, jnp.zeros((), jnp.int32))
    return state, lookup, step


def finish_call(layer: TableModule, before: State, after: State, lookup: Lookup) -> None:
    """Sets the variables that a call of a layer has changed: counts, and the rows of new keys."""
    table = layer.described
    if lookup.train:
        for name, collection in table.spec.buffers.items():
            if after[name] is not before[name]:
                layer.put_variable(collection, name, after[name])
        for name in table.spec.trained_names:
            if after[name] is not before[name]:
                _put_rows(layer, name, after[name])
    if OUT_OF_RANGE in before:
        layer.put_variable(OUT_OF_RANGE, COUNT, after[OUT_OF_RANGE])


def _put_rows(layer: TableModule, name: str, value: jax.Array) -> None:
    """Sets an array with rows of new keys, where its collection is mutable."""
    table = layer.described
    collection = PARAMS if table.update is None else OVERWRITE_WITH_GRADIENT
    if layer.is_mutable_collection(collection):
        box = layer.get_variable(collection, name)
        layer.put_variable(collection, name, nn.meta.replace_boxed(box, value))
    elif table.update is None:
        raise ValueError(
            f"{table.ids.label}optimizer: got None for a table into which a call with the mutable collection "
            f"{HASH_TABLE} inserts keys, whose rows it would lose. Give the table a fused rule, e.g. jax_tt.hash_table"
            "(..., optimizer=jax_tt.optimizers.Adagrad(0.05)), whose next value holds them; or insert the batch first "
            "with jax_tt.linen.update_table, and look up jax_tt.dynamic.with_slots(batch, inserted)."
        )


def fused_variable(module: nn.Module, name: str, init: Callable[[], Any]) -> Any:
    """Value of a variable that its gradient overwrites; boxed if its initialiser returns a box."""
    # If the collection is mutable, flax reports a missing variable itself.
    can_make = module.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
    if not can_make and not module.has_variable(OVERWRITE_WITH_GRADIENT, name):
        label = "/".join(module.path) or type(module).__name__
        raise ValueError(
            f"{label}: the variables hold no {name} of this fused table in the collection "
            f"{OVERWRITE_WITH_GRADIENT}. Give apply the whole dictionary that init returned, or the variables of a "
            "jax_tt.linen.TrainState, not variables['params']."
        )
    return module.variable(OVERWRITE_WITH_GRADIENT, name, init, unbox=False).value


class EmbedModule(TableModule):
    """A layer that looks up one row per id and scores queries against all rows."""

    @nn.nowrap
    def _scaled(self, table: Table) -> Table:
        return scaled_as_embed(table)

    def __call__(
        self,
        inputs: jax.Array | SplitIds,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Looks up ids; returns ``[*inputs.shape, features]``. The arguments are as in `jax_tt.TTEmbed`."""
        result = self._call(lookup_rows, inputs, grad_scale, hyperparameters)
        (result,) = self.promote_dtype(result, dtype=self.dtype, inexact=False)
        return result

    def attend(self, query: jax.Array) -> jax.Array:
        """Scores ``query[..., features]`` against every row, ``[..., num_embeddings]``, as `jax_tt.TTEmbed.attend`."""

        def promote(*arrays: jax.Array) -> Any:
            return self.promote_dtype(*arrays, dtype=self.dtype)

        return attended(self.described, self.state, query, self.options, promote)

    def softmax_cross_entropy(
        self, hidden: jax.Array, targets: Any, *, block: int | None = None
    ) -> jax.Array:
        """Cross entropy of ids and the softmax of `attend`; see `jax_tt.TableEmbed.softmax_cross_entropy`."""

        def promote(*arrays: jax.Array) -> Any:
            return self.promote_dtype(*arrays, dtype=self.dtype)

        table, state = self.described, self.state
        return cross_entropy(table, state, hidden, targets, block, self.options, promote)

    def top_k(
        self,
        queries: jax.Array,
        k: int,
        *,
        exclude: Any = None,
        block: int | None = None,
        recall_target: float | None = None,
    ) -> tuple[jax.Array, Any]:
        """The best ``k`` rows for each query: scores and ids ``[..., k]``, as in `jax_tt.top_k`."""
        options = {"exclude": exclude, "block": block, "recall_target": recall_target}
        method = self.options.method
        return top_k(self.described, self.state, queries, k, method=method, **options)


class EmbedBagModule(TableModule):
    """A layer that returns one pooled vector per bag of ids."""

    # Flax wraps only the methods that stand in the class itself.
    __call__ = BagCalls.__call__


class Sizes(TableModule):
    """The attributes that may be given by position."""

    num_embeddings: int
    features: int


class FactoryModule(Sizes, kw_only=True):
    """A layer that is constructed from the arguments of ``_factory``, of `Lookup` and of the layer."""

    _factory: ClassVar[Callable[..., Table]]
    bounds: str = "warn"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: jax.lax.PrecisionLike = None
    optimizer: Optimizer | None = None
    skip_nonfinite: bool = False
    stochastic_rounding: bool = True
    max_gradient: float | None = None
    axis_name: Any = None
    method: str = "auto"

    @nn.nowrap
    def _describe(self) -> tuple[Table, Lookup]:
        names = {field.name for field in dataclasses.fields(self)} - {"name", "parent"}
        given = {name: getattr(self, name) for name in names}
        table, lookup, _ = described(type(self)._factory, given)
        return table, lookup


class AnyTable(AnyFromPretrained, TableModule):
    """A layer constructed from the description of its table."""

    table: Table
    lookup: Lookup = Lookup(bounds="warn")
    given: GivenState | None = dataclasses.field(default=None, repr=False, kw_only=True)

    @nn.nowrap
    def _given(self) -> GivenState | None:
        return self.given

    @nn.nowrap
    def _describe(self) -> tuple[Table, Lookup]:
        return self.table, self.lookup

    @nn.nowrap
    def _rebuilt(self, before: Table, after: Table) -> Any:
        del before
        return self.clone(table=with_name(unsharded(after), self.table.name), given=None)


class TableEmbed(AnyTable, EmbedModule):
    """Rows of any `Table`; `TTEmbed` and `Embed` are special cases.

    Attributes:
        table: the kind and its sizes.
        lookup: options of the calls.
        promote_dtype: as in `TTEmbed`.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.tables.DenseTable(1000, 16))
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> layer.apply(variables, jnp.array([1, 999])).shape
        (2, 16)
    """

    promote_dtype: Callable[..., Any] = dtypes.promote_dtype

    @property
    def dtype(self) -> Any:
        return self.lookup.dtype


class TableEmbedBag(AnyTable, EmbedBagModule):
    """Pooled rows of any `Table`; `TTEmbedBag` and `EmbedBag` are special cases.

    Attributes:
        table: the kind and its sizes.
        lookup: options of the calls.

    Example:
        >>> import jax, jax_tt
        >>> layer = jax_tt.linen.TableEmbedBag(jax_tt.tables.DenseTable(1000, 16), jax_tt.Lookup("mean"))
        >>> bags = jax_tt.Bags.from_ragged([[17, 4], [], [999]])
        >>> variables = layer.init(jax.random.key(0), bags)
        >>> layer.apply(variables, bags).shape
        (3, 16)
    """
