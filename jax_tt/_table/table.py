"""`Table`: the interface of all kinds of tables."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch, of_positions, present
from jax_tt._ids.id_space import IdSpace
from jax_tt._ids.inputs import one_bag_per_position
from jax_tt._jax.vma import varying_axes
from jax_tt._table.options import Lookup, StepInputs, Update, Wanted
from jax_tt._table.state import StateSpec, slot_shape
from jax_tt._table.step_values import step_values
from jax_tt._table.types import State

# In what a step of a table returns if its scalars are shared: 1 if the step was applied, else 0.
APPLIED = "applied"


class Table(abc.ABC):
    """A table without its arrays: sizes, options of its update, and functions of its state.

    A kind is a frozen dataclass with the fields below and the abstract methods. `ReferenceTable` has all but three of
    them, in plain JAX, and is what most kinds derive from.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        update: `Update` of a fused table; None for ordinary gradients.
        name: for error messages.
        divided: whether rows are on several devices, which have to take part in every lookup.
        parts: the number of devices that divide a batch among them.
    """

    num_embeddings: int
    features: int
    update: Update | None
    name: str | None
    divided: ClassVar[bool] = False
    parts = 1

    @functools.cached_property
    def spec(self) -> StateSpec:
        """The arrays of its states. Every kind defines it, as a `functools.cached_property`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say which arrays its states have; expected a cached property `spec`, "
            "e.g. StateSpec.of({name: shape}, self.update)."
        )

    @abc.abstractmethod
    def init_params(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters by name; an initialiser may box them."""

    @functools.cached_property
    def ids(self) -> IdSpace:
        """The ids that the table has rows for, and their digits."""
        return IdSpace(self.num_embeddings, (self.num_embeddings,), name=self.name)

    # State

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
        shapes = self.spec.stepped_shapes.values()
        for names, param, of_param in zip(
            self.spec.slot_names, self.spec.params(params), shapes, strict=True
        ):
            for name, slot in zip(names, self.update.optimizer.slots, strict=True):
                shape = slot_shape((param.shape[0], *of_param[1:]), slot)
                state[name] = jnp.full(shape, slot.init, slot.dtype)
        return state | self.spec.initial_scalars()

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
        own = {name: state[name] for name in self.spec.trained_names}
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
        rounded_type = self.spec.rounded_type or self.spec.storage(state)
        return step_values(self.update, state["step"], rounded_type, inputs)


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
