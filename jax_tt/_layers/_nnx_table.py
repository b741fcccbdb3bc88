"""The variables of one table in an NNX module."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from jax_tt._layers._hyperparameters import hoisted
from jax_tt._layers._initial import check_value
from jax_tt._layers._names import fresh_state, fused_table
from jax_tt._layers._nnx_variables import FusedParam, OutOfRange
from jax_tt._ops._table import FusedTable
from jax_tt._ops.out_of_range import add_out_of_range
from jax_tt._shape import TTShape
from jax_tt.optimizers import Optimizer


class TableModule(nnx.Module):
    """Holds a table's parameters and, when it is fused, the state of its optimizer beside them."""

    num_embeddings: int
    features: int
    bounds: str
    axis_name: Any
    optimizer: Optimizer | None
    hyperparameters: Mapping[str, Any] = MappingProxyType({})
    name: str | None

    @property
    def label(self) -> str:
        """The table's name in error messages."""
        return self.name or f"{type(self).__name__}({self.num_embeddings}, {self.features})"

    def _set_optimizer(self, optimizer: Any) -> None:
        """Keeps the rule; variables in it become variables of the layer."""
        self.optimizer, variables = hoisted(optimizer)
        if variables:
            self.hyperparameters = nnx.Dict(variables)

    def _create(
        self,
        values: Mapping[str, Any],
        shapes: tuple[tuple[int, ...], ...],
        metadata: Mapping[str, Any],
    ) -> None:
        """Makes the variables; a value may be an array or what ``nnx.with_partitioning`` returns."""
        # Set by `model.eval()` and `model.train()`, as dropout's: an evaluation counts nothing.
        self.deterministic = False
        if self.bounds == "warn":
            self.out_of_range = OutOfRange(jnp.zeros((), jnp.int32))
        kind = nnx.Param if self.optimizer is None else FusedParam
        params = [kind(value, **metadata) for value in values.values()]
        for name, param, shape in zip(values, params, shapes, strict=True):
            check_value(name, param, shape)
            setattr(self, name, param)
        if self.optimizer is None:
            return
        for name, value in fresh_state(self.optimizer, [param[...] for param in params]).items():
            # A slot shaped like its table is laid out like it.
            twin = next((param for param in params if param.shape == value.shape), None)
            like = {} if twin is None else twin.get_metadata()
            setattr(self, name, FusedParam(value, **like))

    def _count_out_of_range(self, ids_or_bags: Any, rows: int | TTShape) -> None:
        if self.bounds != "warn" or self.deterministic:
            return
        total = add_out_of_range(
            self.out_of_range[...], ids_or_bags, rows, self.axis_name, self.label
        )
        # A transformation of plain JAX that closes over the layer takes nothing out of it: flax lets nothing change.
        with contextlib.suppress(TraceContextError):
            self.out_of_range.set_value(total)

    def _read(self, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
        return tuple(self._value(name) for name in names)

    def _fused(self, names: tuple[str, ...]) -> FusedTable:
        assert self.optimizer is not None
        return fused_table(self.optimizer, self._read(names), self._value)

    def _value(self, name: str) -> jax.Array:
        return getattr(self, name)[...]
