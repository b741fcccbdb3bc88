"""The base of the NNX layers: the variables of the state of a table, and their calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from jax_tt._base.arguments import as_scalar, mismatch, type_of
from jax_tt._base.keywords import ChecksKeywords
from jax_tt._collection.by_table import Layout
from jax_tt._collection.host_batch import host_batch
from jax_tt._collection.paths import by_path
from jax_tt._collection.training_state import Described, tables_of
from jax_tt._files.kinds import description_of
from jax_tt._layers.call import (
    BagCalls,
    GivenState,
    TableCalls,
    check_value,
    for_evaluation,
    step_inputs,
)
from jax_tt._layers.variables import (
    WHERE_FLAX_ALLOWS,
    CacheState,
    FusedParam,
    HashState,
    IdOrderState,
    OutOfRange,
    PageTable,
    TableDescription,
)
from jax_tt._lookup.pooled_sums import OUT_OF_RANGE
from jax_tt._table.copies import with_name, with_update, without_values
from jax_tt._table.options import DEFAULT_LOOKUP, Lookup, StepInputs, check_static
from jax_tt._table.sizes import sizes
from jax_tt._table.state import State
from jax_tt._table.step_values import hoisted
from jax_tt._table.table import Table
from jax_tt.optimizers import Optimizer

# Variable types of non-trained arrays, by the name of their linen collection.
_BUFFERS: dict[str, type[nnx.Variable[Any]]] = {
    "row_cache": CacheState,
    "id_order": IdOrderState,
    "hash_table": HashState,
    "placement": PageTable,
}


class LookupOption:
    """An attribute of a layer that is a field of its `Lookup`."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        return self if layer is None else getattr(layer.lookup, self.name)

    def __set__(self, layer: Any, value: Any) -> None:
        layer.lookup = dataclasses.replace(layer.lookup, **{self.name: value})


class _Bounds(LookupOption):
    def __set__(self, layer: Any, value: Any) -> None:
        super().__set__(layer, value)
        layer._count_out_of_range()


class UpdateOption(LookupOption):
    """An attribute of a layer that is a field of the `Update` of its table."""

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        return self if layer is None else getattr(layer.table.update, self.name, None)

    def __set__(self, layer: Any, value: Any) -> None:
        update = layer.table.update
        if update is None:
            raise ValueError(
                f"{self.name}: {layer.table.ids.label}has no fused update; build the layer with an optimizer."
            )
        update = dataclasses.replace(update, **{self.name: value})
        layer.table = with_update(layer.table, update)


class TableOptions:
    """The description of a table, ``table``, and the options of its calls, ``lookup``, of which fields may be set."""

    table: Any
    lookup: Any

    @property
    def num_embeddings(self) -> int:
        return self.table.num_embeddings

    @property
    def features(self) -> int:
        return self.table.features

    @property
    def name(self) -> str | None:
        """The table's name in error messages."""
        return self.table.name

    @name.setter
    def name(self, name: str) -> None:
        self.table = with_name(self.table, name)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that is fused into the backward pass."""
        return None if self.table.update is None else self.table.update.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        if self.table.update is None:
            raise ValueError(
                f"optimizer: {self.table.ids.label}has no optimizer state; build the layer with "
                f"optimizer={optimizer!r}."
            )
        update = dataclasses.replace(self.table.update, optimizer=optimizer)
        check_static("optimizer", optimizer)
        self.table = with_update(self.table, update)

    bounds = LookupOption()
    method = LookupOption()
    axis_name = LookupOption()
    precision = LookupOption()
    skip_nonfinite = UpdateOption()
    stochastic_rounding = UpdateOption()
    max_gradient = UpdateOption()
    frozen = UpdateOption()

    @property
    def host_batch(self) -> Callable[..., Any]:
        """Prepares the ids of a data loader for a step: ``host_batch(ids, capacity=None, sharding=None, local=False)``.

        It calls `jax_tt.pipeline.host_batch`. Ids out of range are treated as ``bounds`` says. It has the description
        of the table and none of its arrays: pickled for the processes of a data loader it takes a few kilobytes, and
        starts no device there.
        """
        pooled = isinstance(self, BagCalls)
        return functools.partial(host_batch, self.table, pooled=pooled, bounds=self.lookup.bounds)


class TableModule(TableOptions, TableCalls, ChecksKeywords, nnx.Module):
    """The state of a table in variables, and the common part of its calls.

    Args:
        table: the description of the table; its name defaults to the class and sizes of the layer.
        lookup: options of the calls.
        given: the state that the layer starts with; None for an initial one.
        rngs: random number generators; the parameters take one key of ``params``.
        metadata: of the variables of the parameters, and of optimizer state of the same shape.
        hyperparameters: variables of scalars that replace fields of the optimizer.
    """

    hyperparameters: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        table: Table,
        lookup: Lookup = DEFAULT_LOOKUP,
        *,
        given: GivenState | None = None,
        rngs: nnx.Rngs,
        metadata: Mapping[str, Any] = MappingProxyType({}),
        hyperparameters: Mapping[str, nnx.Variable[Any]] = MappingProxyType({}),
    ) -> None:
        check_rngs(rngs)
        table = self._named(table)
        self.table = without_values(table)
        self.lookup = lookup
        # Set by `model.eval()` and `model.train()`, as in dropout; no ids are counted in evaluation.
        self.deterministic = False
        if hyperparameters:
            self.hyperparameters = nnx.Dict(dict(hyperparameters))
        self._count_out_of_range()
        kind = variable_type(table, table.spec.param_names[0])
        values = table.init_params(rngs.params()) if given is None else given.params(table)
        params = {name: kind(value, **metadata) for name, value in values.items()}
        for name, param in params.items():
            if name not in table.spec.buffers:
                check_value(name, param, table.spec.param_shapes[name])
            setattr(self, name, param)
        arrays = {name: param[...] for name, param in params.items()}
        self.param_dtype = table.spec.storage(arrays)
        rest = table.init_rest(arrays) if given is None else given.rest(table)
        self._describe()
        for name, value in rest.items():
            # Optimizer state of the same shape as a parameter is sharded like it.
            twin = next((param for param in params.values() if param.shape == value.shape), None)
            like = {} if twin is None or name in table.spec.buffers else twin.get_metadata()
            setattr(self, name, variable_type(table, name)(value, **like))

    def _describe(self) -> None:
        """Keeps the description of the table as it is now beside its arrays, for what reads them in a checkpoint."""
        notes = description_of(self.table)
        if notes is not None:
            self.description = TableDescription(jnp.asarray(notes))

    @property
    def nbytes(self) -> int:
        """Bytes of the table: all that lookups need, without optimizer state."""
        return sizes(self.table.spec, read_state(self))[0]

    @property
    def optimizer_nbytes(self) -> int:
        """Bytes of the optimizer state of a fused table; 0 for other tables, whose state optax has."""
        return sizes(self.table.spec, read_state(self))[1]

    bounds = _Bounds()
    combiner = LookupOption()

    @property
    def dtype(self) -> Any:
        """Type of the rows returned."""
        return jnp.dtype(self.lookup.dtype or self.param_dtype)

    def state(self) -> dict[str, jax.Array]:
        """The arrays of the table by name: the state that methods of ``table`` take."""
        return read_state(self)

    def _count_out_of_range(self) -> None:
        """Keeps the variable of the count where ids out of range are counted."""
        if self.lookup.bounds == "warn" and not hasattr(self, "out_of_range"):
            self.out_of_range = OutOfRange(jnp.zeros((), jnp.int32))

    def _named(self, table: Table) -> Table:
        if table.name is not None:
            return table
        return with_name(table, f"{type(self).__name__}({table.num_embeddings}, {table.features})")

    _inserts = True

    def _bound(self) -> tuple[Table, dict[str, jax.Array], Lookup]:
        return self.table, read_state(self), self.lookup

    def _begin(
        self, grad_scale: Any, hyperparameters: Mapping[str, Any] | None
    ) -> tuple[Table, dict[str, Any], Lookup, StepInputs]:
        """Returns the table, the state, the options and the inputs of the update for a call."""
        table, state = self.table, read_state(self)
        fields = {name: value.get_value() for name, value in self.hyperparameters.items()}
        step = step_inputs(table, grad_scale, hyperparameters, fields)
        lookup = for_evaluation(self.lookup) if self.deterministic else self.lookup
        if lookup.train and lookup.bounds == "warn":
            state[OUT_OF_RANGE] = self.out_of_range[...]
        return table, state, lookup, step

    def _finish(self, before: State, after: State, lookup: Lookup) -> None:
        """Sets the variables that a call has changed: counts, and the rows of new keys."""
        table = self.table
        if lookup.train:
            for name in (*table.spec.trained_names, *table.spec.buffers):
                if after[name] is not before[name]:
                    set_in_call(f"{table.ids.label}{name}", getattr(self, name), after[name])
        if OUT_OF_RANGE in before:
            with WHERE_FLAX_ALLOWS:
                self.out_of_range.set_value(after[OUT_OF_RANGE])


# Functions instead of methods: `nnx.tabulate` traces every public method of a layer, whose results must be arrays.


def read_state(layer: TableModule) -> dict[str, jax.Array]:
    """Returns the arrays of a layer's table by name, and the step count of a table of a collection."""
    names = (*layer.table.spec.trained_names, *layer.table.spec.buffers)
    return {name: getattr(layer, name)[...] for name in names}


def write_state(layer: TableModule, before: State, after: State) -> None:
    """Sets the variables whose arrays differ between two states."""
    for name, value in after.items():
        if value is not before[name]:
            getattr(layer, name).set_value(value)


def set_in_call(label: str, variable: nnx.Variable[Any], value: Any) -> None:
    """Sets a variable that a training call has changed."""
    try:
        variable.set_value(value)
    except TraceContextError:
        raise TypeError(
            f"{label}: a training call sets this variable, which JAX transformations that close over the layer, such "
            "as jax.lax.scan, forbid. Pass the layer through nnx.scan, or call layer.eval() first, after which calls "
            "count and insert nothing."
        ) from None


def variable_type(table: Table, name: str) -> type[nnx.Variable[Any]]:
    """The variable type of an array of a table's state."""
    if name in table.spec.buffers:
        return _BUFFERS.get(table.spec.buffers[name], nnx.Variable)
    return nnx.Param if table.update is None else FusedParam


def hoisted_optimizer(optimizer: Any) -> tuple[Any, dict[str, nnx.Variable[Any]]]:
    """A static optimizer, and the variables that were fields of ``optimizer``, by name."""
    if optimizer is None:
        return None, {}
    static, variables = hoisted(optimizer, lambda value: isinstance(value, nnx.Variable))
    for name, variable in variables.items():
        if isinstance(variable, nnx.Param):
            got = f"{type_of(variable)}, which would be trained"
            expected = f"an nnx.Variable, e.g. {name}=nnx.Variable(jnp.float32(0.05))"
            raise mismatch(name, got, expected, error=TypeError)
        if isinstance(variable.get_value(), int | float):
            variable.set_value(jnp.asarray(variable.get_value(), float))
        as_scalar(name, variable.get_value())
    return static, variables


def check_rngs(rngs: Any) -> None:
    """Raises unless a layer can draw its parameters from ``rngs``."""
    if not callable(getattr(rngs, "params", None)):
        expected = "flax.nnx.Rngs, e.g. rngs=nnx.Rngs(0), or nnx.Rngs(key) for a key of jax.random"
        raise mismatch("rngs", type_of(rngs), expected, error=TypeError)


@functools.singledispatch
def described_layer(layer: nnx.Module) -> Described:
    """What a layer says about its own arrays in checkpoints, without those of the layers in it, by path from there."""
    del layer
    return Described({}, {}, Layout())


@described_layer.register
def _(layer: TableModule) -> Described:
    return Described({(): layer.table}, {}, Layout())


@tables_of.register(nnx.Module)
def _(model: nnx.Module) -> Described:
    """The tables of all layers of a module, and all its variables."""
    layers = [
        (tuple(map(str, path)), described_layer(one)) for path, one in nnx.iter_modules(model)
    ]
    layouts = [one.layout.within(path) for path, one in layers]
    layout = Layout(
        {path: parts for one in layouts for path, parts in one.parts.items()},
        {path: new for one in layouts for path, new in one.moved.items()},
    )
    tables = {
        layout.moved.get((*path, *own), (*path, *own)): table
        for path, one in layers
        for own, table in one.tables.items()
    }
    return Described(tables, by_path(nnx.state(model)), layout)
