"""The linen layer of any table: the variables of its state, and its calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from flax.linen import dtypes
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._base.arguments import one_of
from jax_tt._base.keywords import ChecksKeywords
from jax_tt._collection.host_batch import host_batch
from jax_tt._collection.lookup_features import check_lookup
from jax_tt._kinds.cached.table import COLLECTION as ROW_CACHE
from jax_tt._kinds.hashed.table import COLLECTION as HASH_TABLE
from jax_tt._layers.call import (
    GivenState,
    ScoreCalls,
    check_value,
    for_evaluation,
    scaled_as_embed,
    step_inputs,
)
from jax_tt._layers.linen.gradients import PARAMS
from jax_tt._layers.pretrained import AnyFromPretrained
from jax_tt._layers.variables import FusedParam
from jax_tt._lookup.pooled_sums import OUT_OF_RANGE
from jax_tt._lookup.rows import lookup_rows, pooled_rows
from jax_tt._ops.insert_in_call import training, with_checked_gradients
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.copies import with_name, without_values
from jax_tt._table.initial_rows import init_param
from jax_tt._table.options import (
    COMBINERS,
    DEFAULT_LOOKUP,
    Lookup,
    StepInputs,
    check_static,
)
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._table.wrapper import innermost

COUNT = "count"
# So that `nnx.bridge.ToNNX` makes variables that `FusedOptimizer` overwrites. What else is in the collection, such as
# scales of 8-bit floats, has its next value as its gradient as well.
nnx.register_variable_name(OVERWRITE_WITH_GRADIENT, FusedParam, overwrite=True)


class TableEmbed(ChecksKeywords, AnyFromPretrained, ScoreCalls, nn.Module):
    """Rows of any `Table`, or pooled rows of bags.

    The parameters of a table are variables in the collection ``params`` or, with an ``optimizer``, together with its
    state in ``_overwrite_with_gradient``, which `TrainState` keeps apart from ``params`` and overwrites with its next
    values. The other arrays are in the collections that ``Table.spec`` names: ``id_order``, ``quantized``, and those
    that calls change where they are mutable. In a mutable ``row_cache``, ``apply`` counts ids; in a mutable
    ``hash_table``, it inserts keys; in a mutable ``out_of_range``, it counts ids out of range if ``bounds="warn"``.

    Attributes:
        table: the kind and its sizes, e.g. from `jax_tt.dense_table`. Initialisers may be boxed, as by
            ``nn.with_partitioning``; optimizer state of the shape of a parameter is boxed like it. Tensor trains whose
            scale was not chosen start with rows of about unit length, as in ``nn.Embed``, unless rows are pooled.
        lookup: options of the calls, without a combiner.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"`` for a vector per bag, as in
            `jax_tt.Feature`; None for a row per id.
        promote_dtype: as in ``nn.Embed``; called with ``rows`` by ``__call__`` and with ``query, *parameters`` by
            ``attend``.
        partitioning: wraps the initialiser of every parameter, for those that are given by name, e.g.
            ``functools.partial(nn.with_partitioning, names=(None, None, "model", None))`` for tensor trains.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt.linen
        >>> table = jax_tt.tt_table(50_000, 64, tt_ranks=8)
        >>> layer = jax_tt.linen.TableEmbed(table)
        >>> ids = jnp.array([[1, 2, 3], [4, 5, 49_999]])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> sorted(variables["params"])
        ['core_0', 'core_1', 'core_2']
        >>> layer.apply(variables, ids).shape
        (2, 3, 64)
        >>> layer.apply(variables, jnp.ones((2, 64)), method="attend").shape
        (2, 50000)
        >>> bags = jax_tt.Bags.from_ragged([[17, 4], [], [49_999]])
        >>> jax_tt.linen.TableEmbed(table, combiner="mean").apply(variables, bags).shape
        (3, 64)
    """

    table: Table
    lookup: Lookup = DEFAULT_LOOKUP
    combiner: str | None = dataclasses.field(default=None, kw_only=True)
    promote_dtype: Callable[..., Any] = dataclasses.field(
        default=dtypes.promote_dtype, kw_only=True
    )
    partitioning: Callable[..., Any] | None = dataclasses.field(default=None, kw_only=True)
    given: GivenState | None = dataclasses.field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_lookup(self.lookup, "give it to the layer, combiner={!r}")
        if self.combiner is not None:
            one_of("combiner", self.combiner, COMBINERS, ", or None for one row per id")
        super().__post_init__()

    def setup(self) -> None:
        self.options = dataclasses.replace(self.lookup, combiner=self.combiner or "sum")
        self.described = self._described("/".join(self.path))
        self.state = self._declare()

    @nn.nowrap
    def _described(self, path: str = "") -> Table:
        """The table of the layer at a path of the model, which is its name in error messages."""
        table = self._scaled(self.table)
        if table.update is not None:
            check_static("optimizer", table.update.optimizer)
        sizes = f"{table.num_embeddings}, {table.features}"
        default = path or f"{type(self).__name__}({sizes})"
        return table if table.name is not None else with_name(table, default)

    @nn.nowrap
    def _scaled(self, table: Table) -> Table:
        """The table with the initial scale that the layer has by default."""
        return scaled_as_embed(table) if self.combiner is None else table

    @nn.nowrap
    def _rebuilt(self, before: Table, after: Table) -> TableEmbed:
        """The layer of a table that has changed between steps."""
        return self.clone(table=with_name(unsharded(after), self.table.name), given=None)

    @property
    def host_batch(self) -> Callable[..., Any]:
        """Prepares ids for a compiled step, as `jax_tt.TableEmbed.host_batch`; it needs no variables."""
        table, pooled = without_values(self._described()), self.combiner is not None
        return functools.partial(host_batch, table, pooled=pooled, bounds=self.lookup.bounds)

    # Flax wraps only the methods that stand in the class itself.
    attend = ScoreCalls.attend
    softmax_cross_entropy = ScoreCalls.softmax_cross_entropy
    top_k = ScoreCalls.top_k

    def __call__(
        self,
        inputs: Any,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Looks up ids, or pools the rows of bags; the arguments are as in `jax_tt.TableEmbed`.

        Returns:
            ``[*inputs.shape, features]``; with a ``combiner``, ``[B, features]`` of `Bags` or ids ``[B, L]``.
        """
        op = lookup_rows if self.combiner is None else pooled_rows
        result = self._call(op, inputs, grad_scale, hyperparameters)
        (result,) = self._promote(result, inexact=False)
        return result

    @nn.nowrap
    def _promote(self, *arrays: jax.Array, **options: Any) -> Any:
        return self.promote_dtype(*arrays, dtype=self.lookup.dtype, **options)

    @nn.nowrap
    def _declare(self) -> dict[str, jax.Array]:
        """The arrays of the table by name; initialisers may return boxed values."""
        table, given, wrap = self.described, self.given, self.partitioning

        def initial(key: jax.Array, name: str) -> Any:
            return init_param(table, name, key) if given is None else given.params(table)[name]

        boxed = {}
        for name in innermost(table).spec.param_shapes:
            init = functools.partial(initial, name=name)
            boxed[name] = self._first(name, init if wrap is None else wrap(init))
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

    @property
    def _inserts(self) -> bool:
        return self.is_mutable_collection(HASH_TABLE)

    # Helper methods have no wrapper: `nn.tabulate` lists the first wrapped method that is called.

    @nn.nowrap
    def _bound(self) -> tuple[Table, dict[str, jax.Array], Lookup]:
        return self.described, dict(self.state), self.options

    @nn.nowrap
    def _begin(
        self, grad_scale: Any, hyperparameters: Mapping[str, Any] | None
    ) -> tuple[Table, dict[str, Any], Lookup, StepInputs]:
        """Returns the table, the state, the options and the inputs of the update for a call."""
        table, state, lookup = self._bound()
        step = step_inputs(table, grad_scale, hyperparameters, {})
        initializing = self.is_initializing()
        # A call without training does not count in a row cache, and reads unknown keys as in serving.
        if initializing or not (self._inserts or self.is_mutable_collection(ROW_CACHE)):
            lookup = for_evaluation(lookup)
        if table.ids.takes_keys and not self._inserts:
            state = dict(with_checked_gradients(training([table], [lookup]), state))
        # Not in `init`: a `TrainState` takes its whole result, and holds no counts.
        counts = lookup.bounds == "warn" and not initializing
        if counts and self.is_mutable_collection(OUT_OF_RANGE):
            state[OUT_OF_RANGE] = self.get_variable(OUT_OF_RANGE, COUNT, jnp.zeros((), jnp.int32))
        return table, state, lookup, step

    @nn.nowrap
    def _finish(self, before: State, after: State, lookup: Lookup) -> None:
        """Sets the variables that a call has changed: counts, and the rows of new keys."""
        table = self.described
        if lookup.train:
            for name, collection in table.spec.buffers.items():
                if after[name] is not before[name]:
                    self.put_variable(collection, name, after[name])
            for name in table.spec.trained_names:
                if after[name] is not before[name]:
                    self._put_rows(name, after[name])
        if OUT_OF_RANGE in before:
            self.put_variable(OUT_OF_RANGE, COUNT, after[OUT_OF_RANGE])

    @nn.nowrap
    def _put_rows(self, name: str, value: jax.Array) -> None:
        """Sets an array with rows of new keys, where its collection is mutable."""
        table = self.described
        collection = trained_collection(table)
        if self.is_mutable_collection(collection):
            box = self.get_variable(collection, name)
            self.put_variable(collection, name, nn.meta.replace_boxed(box, value))
        elif table.update is None:
            raise ValueError(
                f"{table.ids.label}optimizer: got None for a table into which a call with the mutable collection "
                f"{HASH_TABLE} inserts keys, whose rows it would lose. Give the table a fused rule, e.g. "
                "jax_tt.hash_table(..., optimizer=jax_tt.optimizers.Adagrad(0.05)), whose next value holds them; or "
                "insert the batch first with jax_tt.linen.update_table, and look up jax_tt.dynamic.with_slots(batch, "
                "inserted)."
            )


def trained_collection(table: Table) -> str:
    """The collection of the arrays of a table that are trained."""
    return PARAMS if table.update is None else OVERWRITE_WITH_GRADIENT


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
