"""The variables of one table in an NNX module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jax_tt._layers._initial import check_value
from jax_tt._layers._names import fresh_state, fused_table
from jax_tt._layers._nnx_variables import FusedParam
from jax_tt._ops._table import FusedTable
from jax_tt.optimizers import Optimizer


class TableModule(nnx.Module):
    """Holds a table's parameters and, when it is fused, the state of its optimizer beside them."""

    num_embeddings: int
    features: int
    optimizer: Optimizer | None
    name: str | None

    @property
    def label(self) -> str:
        """The table's name in error messages."""
        return self.name or f"{type(self).__name__}({self.num_embeddings}, {self.features})"

    def _create(
        self,
        values: Mapping[str, Any],
        shapes: tuple[tuple[int, ...], ...],
        metadata: Mapping[str, Any],
    ) -> None:
        """Makes the variables; a value may be an array or what ``nnx.with_partitioning`` returns."""
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

    def _read(self, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
        return tuple(self._value(name) for name in names)

    def _fused(self, names: tuple[str, ...]) -> FusedTable:
        assert self.optimizer is not None
        return fused_table(self.optimizer, self._read(names), self._value)

    def _value(self, name: str) -> jax.Array:
        return getattr(self, name)[...]
