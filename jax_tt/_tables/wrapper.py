"""`Wrapper`: a table in front of a table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax

from jax_tt._lookup._batch import Batch
from jax_tt._tables.options import Lookup, StepInputs, Update
from jax_tt._tables.table import Params, State, Table


@dataclasses.dataclass(frozen=True)
class Wrapper(Table):
    """Does everything as the table that it holds; kinds of wrappers override what they change.

    Its state is that of the table and more.
    """

    table: Any

    @property
    def num_embeddings(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.num_embeddings

    @property
    def features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.features

    @property
    def param_dtype(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.param_dtype

    @property
    def update(self) -> Update | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.update

    @property
    def name(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.table.name

    @property
    def innermost(self) -> Table:
        return self.table.innermost

    @property
    def cached(self) -> Any:
        return self.table.cached

    @property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.table.param_shapes

    @functools.cached_property
    def radices(self) -> tuple[int, ...]:
        return self.table.radices

    @functools.cached_property
    def buffers(self) -> dict[str, str]:
        return self.table.buffers

    def with_name(self, name: str | None) -> Self:
        return dataclasses.replace(self, table=self.table.with_name(name))

    def with_update(self, update: Update | None) -> Self:
        return dataclasses.replace(self, table=self.table.with_update(update))

    @functools.cached_property
    def trained_names(self) -> tuple[str, ...]:
        return self.table.trained_names

    @functools.cached_property
    def units(self) -> tuple[tuple[str, ...], ...]:
        return self.table.units

    @functools.cached_property
    def constant_names(self) -> tuple[str, ...]:
        return self.table.constant_names

    def storage(self, state: State) -> Any:
        return self.table.storage(state)

    def init_param(self, name: str, key: jax.Array) -> Any:
        return self.table.init_param(name, key)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        return self.table.init_params(key)

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        return self.table.init_rest(params)

    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        return self.table.rows(params, digits, precision)

    def method(self, lookup: Lookup, state: State) -> str:
        return self.table.method(lookup, state)

    def differentiates_itself(self, lookup: Lookup) -> bool:
        return self.table.differentiates_itself(lookup)

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        return self.table.prepare(state, batch, lookup)

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        return self.table.forward(state, batch, lookup)

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self.table.backward(state, batch, residuals, g, lookup)

    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self.table.step(state, batch, residuals, g, lookup, values)

    def step_values(self, state: State, inputs: StepInputs) -> Any:
        return self.table.step_values(state, inputs)

    def weights_gradient(
        self, state: State, batch: Batch, g: jax.Array, lookup: Lookup
    ) -> jax.Array:
        return self.table.weights_gradient(state, batch, g, lookup)

    def maintain(self, state: State, method: str = "auto") -> dict[str, Any]:
        return {**state, **self.table.maintain(state, method)}

    def check(self, state: State) -> None:
        self.table.check(state)

    def without_values(self) -> Self:
        return dataclasses.replace(self, table=self.table.without_values())

    @functools.cached_property
    def attended_names(self) -> tuple[str, ...]:
        return self.table.attended_names

    def attend(self, state: State, query: jax.Array, precision: Any) -> jax.Array:
        return self.table.attend(state, query, precision)

    def to_dense(self, state: State) -> jax.Array:
        return self.table.to_dense(state)
