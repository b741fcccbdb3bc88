"""`Table`: the interface of all kinds of tables."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.storage import STORAGE, check_storage
from jax_tt._ids.batch import Batch, of_positions, present
from jax_tt._ids.id_space import IdSpace
from jax_tt._ids.inputs import one_bag_per_position
from jax_tt._jax.vma import varying_axes
from jax_tt._table.options import Lookup, StepInputs, Update, Wanted
from jax_tt._table.step_values import step_values
from jax_tt._table.types import Params, Slots, State
from jax_tt.optimizers import Slot

if TYPE_CHECKING:
    from jax_tt._ids.id_order import IdOrder


# State of a fused table other than parameters and slots.
SCALARS = ("step", "sentinel", "used")
# In what a step of a table returns if its scalars are shared: 1 if the step was applied, else 0.
APPLIED = "applied"
_STORAGE = set(STORAGE)
_CAST = (
    " Leave fused tables out of casts of a model: param_dtype= of the table is the type of its rows, and dtype= of the "
    "layer or Lookup that of the results."
)


class Table(abc.ABC):
    """A table without its arrays: sizes, options of its update, and functions of its state.

    A kind is a frozen dataclass with the fields below and the abstract methods. `ReferenceTable` has all but three of
    them, in plain JAX, and is what most kinds derive from.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        update: `Update` of a fused table; None for ordinary gradients.
        name: for error messages.
        cacheable: whether it can have a row cache.
        row_names: the parameters of which row k is that of id k alone.
        rounded_type: name of the type that new rows are rounded to; None for that of the parameters.
        divided: whether rows are on several devices, which have to take part in every lookup.
        parts: the number of devices that divide a batch among them.
    """

    num_embeddings: int
    features: int
    update: Update | None
    name: str | None
    cacheable: ClassVar[bool] = False
    row_names: ClassVar[tuple[str, ...]] = ()
    rounded_type: ClassVar[str | None] = None
    divided: ClassVar[bool] = False
    parts = 1

    @property
    @abc.abstractmethod
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by name; the first axis counts the rows of the update."""

    @property
    def stepped_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters as the rule of an update sees them."""
        return self.param_shapes

    @abc.abstractmethod
    def init_params(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters by name; an initialiser may box them."""

    @functools.cached_property
    def ids(self) -> IdSpace:
        """The ids that the table has rows for, and their digits."""
        return IdSpace(self.num_embeddings, (self.num_embeddings,), name=self.name)

    # State

    @functools.cached_property
    def buffers(self) -> dict[str, str]:
        """Linen collections of the arrays without gradients, by name."""
        return {}

    @property
    def innermost(self) -> Table:
        """The table without wrappers."""
        return self

    @property
    def cached(self) -> Any:
        """The `RowCachedTable` among the wrappers, or None."""
        return None

    @property
    def id_order(self) -> IdOrder | None:
        """The order of ids in an initial state."""
        return None

    @functools.cached_property
    def param_names(self) -> tuple[str, ...]:
        return tuple(self.param_shapes)

    @functools.cached_property
    def slot_names(self) -> tuple[tuple[str, ...], ...]:
        """Names of the optimizer state, one tuple per parameter."""
        slots = () if self.update is None else self.update.optimizer.slots
        return tuple(
            tuple(f"slot_{slot.name}_{k}" for slot in slots) for k in range(len(self.param_shapes))
        )

    @functools.cached_property
    def stepped_names(self) -> tuple[tuple[str, ...], ...]:
        """Those of `slot_names` that steps of rows change."""
        slots = () if self.update is None else self.update.optimizer.slots
        return tuple(
            tuple(name for name, slot in zip(names, slots, strict=True) if slot.stepped)
            for names in self.slot_names
        )

    @functools.cached_property
    def trained_names(self) -> tuple[str, ...]:
        """Arrays that a loss is differentiated with respect to: the parameters, or the whole state if fused."""
        if self.update is None:
            return self.param_names
        slots = (name for names in self.slot_names for name in names)
        return *self.param_names, *slots, *self.scalar_names

    @functools.cached_property
    def scalar_names(self) -> tuple[str, ...]:
        """State of a fused table other than parameters and slots, unless a collection has it."""
        return () if self.update is None or self.update.shared else SCALARS

    @functools.cached_property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of `trained_names`."""
        shapes: dict[str, tuple[int, ...]] = dict(self.param_shapes)
        if self.update is None:
            return shapes
        for names, shape in zip(self.slot_names, self.stepped_shapes.values(), strict=True):
            for name, slot in zip(names, self.update.optimizer.slots, strict=True):
                shapes[name] = slot_shape(shape, slot)
        return shapes | dict.fromkeys(self.scalar_names, ())

    @functools.cached_property
    def slot_dtypes(self) -> dict[str, Any]:
        """Types of the optimizer state by name."""
        slots = () if self.update is None else self.update.optimizer.slots
        return {
            name: jnp.dtype(slot.dtype)
            for names in self.slot_names
            for name, slot in zip(names, slots, strict=True)
        }

    @functools.cached_property
    def row_arrays(self) -> dict[str, float | None]:
        """The arrays of which entry k is that of row k alone, and the entries of a new row; None for its values."""
        found: dict[str, float | None] = dict.fromkeys(self.row_names)
        slots = () if self.update is None else self.update.optimizer.slots
        for param, names in zip(self.param_names, self.slot_names, strict=True):
            pairs = zip(names, slots, strict=True) if param in self.row_names else ()
            found |= {name: slot.init for name, slot in pairs if slot.rows is None}
        return found

    @functools.cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        """Parts of a fused table that can only be differentiated as a whole."""
        return (self.trained_names,)

    @functools.cached_property
    def constant_names(self) -> tuple[str, ...]:
        """Arrays without a gradient that a lookup reads."""
        return ()

    def params(self, state: State) -> Params:
        return tuple(state[name] for name in self.param_names)

    def slots(self, state: State) -> Slots:
        return tuple(tuple(state[name] for name in names) for names in self.slot_names)

    def stepped_slots(self, state: State) -> Slots:
        """The slots that steps of rows change."""
        return tuple(tuple(state[name] for name in names) for names in self.stepped_names)

    def storage(self, state: State) -> Any:
        """Type of the parameters."""
        return state[self.param_names[0]].dtype

    def init(self, key: jax.Array) -> dict[str, Any]:
        """An initial state."""
        params = self.init_params(key)
        return {**params, **self.init_rest(params)}

    def init_param(self, name: str, key: jax.Array) -> Any:
        """One initial parameter, if every parameter has its own key."""
        return self.init_params(key)[name]

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The rest of an initial state with these parameters; for a fused table the optimizer state at step 0."""
        if self.update is None:
            return {}
        state: dict[str, jax.Array] = {}
        shapes = self.stepped_shapes.values()
        for names, param, of_param in zip(
            self.slot_names, self.params(params), shapes, strict=True
        ):
            for name, slot in zip(names, self.update.optimizer.slots, strict=True):
                shape = slot_shape((param.shape[0], *of_param[1:]), slot)
                state[name] = jnp.full(shape, slot.init, slot.dtype)
        return state | {
            name: jnp.full((), float(name != "step"), jnp.float32) for name in self.scalar_names
        }

    def check(self, state: State) -> None:
        """Raises if arrays are missing from a state, or do not belong to this table."""
        if any(name not in state for name in self.trained_names):
            self.require(state, self.trained_names)
        shapes = self.param_shapes
        dtypes = {state[name].dtype.name for name in shapes}
        if len(dtypes) != 1 or not dtypes <= _STORAGE:
            check_storage(self.ids.label, "parameters", dtypes)
        for name, shape in self.trained_shapes.items():
            array = state[name]
            own = array.dtype if name in shapes else jnp.float32
            dtype = self.slot_dtypes.get(name, jnp.dtype(own))
            if array.shape != shape or array.dtype != dtype:
                advice = _CAST if array.shape == shape else ""
                raise ValueError(
                    f"{self.ids.label}{name}: got {array.dtype} of shape {array.shape}; expected {dtype} of shape "
                    f"{shape}, as this table and its optimizer have.{advice}"
                )

    def require(self, state: State, names: Sequence[str]) -> None:
        """Raises where arrays of these names are missing from a state."""
        missing = [name for name in names if name not in state]
        if missing and (
            tables := [name for name, own in state.items() if isinstance(own, Mapping)]
        ):
            raise ValueError(
                f"{self.ids.label}state: got the arrays of several tables, {', '.join(map(str, tables))}; expected the "
                f"arrays of this table, e.g. state[{tables[0]!r}]."
            )
        if missing:
            raise ValueError(
                f"{self.ids.label}state: has no {', '.join(missing)}; expected what Table.init returns, with the "
                f"arrays {', '.join(names)}."
            )

    # Lookups

    def method(self, lookup: Lookup, state: State) -> str:
        """The method of a lookup: ``"auto"`` is resolved as far as possible."""
        if lookup.method == "reference":
            return lookup.method
        if lookup.method == "auto":
            return "reference"
        raise RuntimeError(
            f"method={lookup.method!r}: {type(self).__name__} has no native ops; use method='reference'."
        )

    def group(self, lookup: Lookup) -> Any:
        """The `jax_tt._table.groups.Group` whose op takes this table with others, or None."""
        del lookup
        return None

    def differentiates_itself(self, lookup: Lookup) -> bool:
        """Whether JAX can differentiate `forward` itself, to any order."""
        return lookup.method == "reference" and self.update is None

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        """Preparation of a batch before the differentiated part: cache probes, counts, maps of ids."""
        del lookup
        return state, batch

    def adds_rows(self, lookup: Lookup) -> bool:
        """Whether lookups add `added_rows` to those of the table."""
        del lookup
        return False

    def added_rows(
        self, state: State, given: Batch, prepared: Batch, lookup: Lookup, storage: Any
    ) -> tuple[Table, State, Batch]:
        """A lookup in constant rows whose sums are added to those of the prepared batch, if `adds_rows`.

        Args:
            state: before the call, without the trained arrays.
            given: the batch before `prepare`.
            prepared: the batch after it, which has the same weights and bags.
            lookup: as in `prepare`.
            storage: type of the parameters.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        """Weighted sums ``[S, nb, D]`` in the accumulator type, and residuals."""

    @abc.abstractmethod
    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        """Gradients of the parameters in their accumulator type, and of the weights if they are wanted."""

    @abc.abstractmethod
    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        """The state after the update with output gradient ``g``, and the gradient of the weights."""

    def summed_axes(self, state: State, batch: Batch, g: jax.Array, lookup: Lookup) -> Any:
        """The axes that a step sums gradients over, as `Lookup.axis_name`.

        Where shards of a batch stand beside a replicated table, they are the axes of the shards.
        """
        own = {name: state[name] for name in self.trained_names}
        axes = varying_axes(batch, g) - varying_axes(own)
        return tuple(sorted(axes, key=str)) if axes else lookup.axis_name

    def weights_gradient(
        self, state: State, batch: Batch, g: jax.Array, lookup: Lookup
    ) -> jax.Array:
        """``row(i_j) . g[b(j)]`` for every position, without computing gradients of the table."""
        lookup = dataclasses.replace(lookup, wanted=Wanted())
        rows, _ = self.forward(state, one_bag_per_position(batch), lookup)
        rows = rows.reshape(batch.num_segments, batch.capacity, rows.shape[-1])
        of_bag = of_positions(batch, g) if batch.num_bags else jnp.zeros_like(rows)
        return jnp.where(present(batch), jnp.sum(rows * of_bag, axis=-1), 0)

    def step_values(self, state: State, inputs: StepInputs) -> Any:
        """The arrays of an update, such as its hyper-parameters."""
        if self.update is None:
            return ()
        if self.update.shared and "sentinel" not in state:
            raise ValueError(
                f"{self.ids.label}a table of a collection was looked up on its own; it shares a sentinel with the "
                "other tables. Call the collection, or look it up without an optimizer, "
                "jax_tt.extension.with_update(table, None)."
            )
        rounded_type = self.rounded_type or self.storage(state)
        return step_values(self.update, state["step"], rounded_type, inputs)

    # The whole table

    @abc.abstractmethod
    def to_dense(self, state: State) -> jax.Array:
        """The table ``[N, D]`` in the accumulator type."""

    @functools.cached_property
    def attended_names(self) -> tuple[str, ...]:
        """The arrays that `attend` multiplies with queries."""
        return self.param_names

    def attend(self, state: State, query: jax.Array, precision: Any) -> jax.Array:
        """Products of ``query[B, D]`` with every row, ``[B, N]``."""
        return jnp.einsum("bd,nd->bn", query, self.to_dense(state), precision=precision)


def check_table(table: Any, state: Any) -> None:
    """Raises unless these are a description of a table and arrays by name."""
    if not isinstance(table, Table):
        raise TypeError(
            f"table: got a {type(table).__name__}; expected a jax_tt.Table, e.g. jax_tt.dense_table(1000, 16). A "
            "Collection goes to jax_tt.lookup_features, arrays go to the functions of jax_tt.tt and jax_tt.functional."
        )
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{table.ids.label}state: got a {type(state).__name__}; expected arrays by name, as Table.init returns."
        )


def slot_shape(param_shape: Sequence[int], slot: Slot) -> tuple[int, ...]:
    """Shape of an optimizer slot: one entry per row, or per entry of each row."""
    rows = param_shape[0] if slot.rows is None else slot.rows
    return (rows,) if slot.rowwise else (rows, math.prod(param_shape[1:]))


def named(table: Table, params: Sequence[Any]) -> dict[str, Any]:
    """Parameters by name."""
    return dict(zip(table.param_names, params, strict=True))
