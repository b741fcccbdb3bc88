"""`Table`: the interface of all kinds of tables."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import IdSpace
from jax_tt._table.options import Lookup, Update
from jax_tt._table.sizes import Sized
from jax_tt._table.state import State, StateSpec, slot_shape, slot_type

# In what a step of a table returns if its scalars are shared: 1 if the step was applied, else 0.
APPLIED = "applied"


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a call of a table runs, which `Table.execution` settles once, before the call begins.

    Attributes:
        method: ``"reference"``, or a method with native operations; ``"auto"`` where these are chosen by the platform
            that a program is compiled for.
        group: the operation that takes the table together with others, or None.
        differentiable: whether JAX differentiates `Table.forward` itself, to any order.
        devices: the number of devices that the batch of a sharded table is divided over; 0 for other tables.

    A kind that never uses native operations:

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> class PlainTable(jax_tt.tables.DenseTable):
    ...     def execution(self, lookup, state):
    ...         return jax_tt.extension.Execution("reference", differentiable=self.update is None)
    >>> table = PlainTable(1000, 16)
    >>> rows, _ = jax_tt.lookup(table, table.init(jax.random.key(0)), jnp.array([3]), method="auto")
    >>> rows.shape
    (1, 16)
    """

    method: str = "reference"
    group: Any = None
    differentiable: bool = False
    devices: int = 0


class Table(Sized, abc.ABC):
    """A table without its arrays: sizes, options of its update, and functions of its state.

    A kind is a frozen dataclass with the fields below and the abstract methods. `ReferenceTable` has all but three of
    them, in plain JAX, and is what most kinds derive from.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        update: `Update` of a fused table; None for ordinary gradients.
        name: for error messages.
        nbytes: bytes of all that lookups need, without optimizer state.
        optimizer_nbytes: bytes of the optimizer state of a fused table.

    >>> import jax_tt
    >>> table = jax_tt.dense_table(1000, 16, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.05))
    >>> table.nbytes, table.optimizer_nbytes  # of the latter, 12 are its scalars
    (64000, 4012)
    """

    num_embeddings: int
    features: int
    update: Update | None
    name: str | None

    @functools.cached_property
    def spec(self) -> StateSpec:
        """The arrays of its states. Every kind defines it, as a `functools.cached_property`."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say which arrays its states have; expected a cached property `spec`, "
            "e.g. jax_tt.extension.StateSpec.of({name: shape}, self.update)."
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
                state[name] = jnp.full(shape, slot.init, slot_type(slot, param.dtype))
        return state | self.spec.initial_scalars()

    # Lookups

    def execution(self, lookup: Lookup, state: State) -> Execution:
        """How a call with these options runs on a state; kinds with native operations override it."""
        del state
        if lookup.method not in ("reference", "auto"):
            raise RuntimeError(
                f"method={lookup.method!r}: {type(self).__name__} has no native ops; use method='reference'."
            )
        return Execution(differentiable=self.update is None)

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        """Preparation of a batch before the differentiated part: cache probes, counts, maps of ids."""
        del lookup
        return state, batch

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


_SHOWN = 3


def scope_of(tables: Iterable[Any]) -> str:
    """The name of a `jax.named_scope` around operations on tables, so that profiles say what they were for.

    A table without a name has that of its kind. Of many tables, the first ones are named.
    """
    names = list(dict.fromkeys(table.name or type(table).__name__ for table in tables))
    more = len(names) - _SHOWN
    return "+".join([*names[:_SHOWN], *([f"{more} more"] if more > 0 else [])])
