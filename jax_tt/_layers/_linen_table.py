"""The variables of one table in a linen module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._layers._initial import check_value
from jax_tt._layers._names import fresh_state, fused_table
from jax_tt._ops._table import FusedTable


class TableModule(nn.Module):
    """Declares a table's parameters or, when it is fused, its overwritten variables."""

    @property
    def label(self) -> str:
        """The table's name in error messages: its path in the model."""
        return (
            "/".join(self.path) or f"{type(self).__name__}({self.num_embeddings}, {self.features})"
        )

    def _declare(
        self,
        inits: Mapping[str, Callable[[jax.Array], Any]],
        shapes: tuple[tuple[int, ...], ...],
    ) -> tuple[jax.Array, ...] | FusedTable:
        """The table as the ops take it; ``inits`` may return boxed values."""
        if self.optimizer is None:
            params = tuple(self.param(name, init) for name, init in inits.items())
            _check(inits, params, shapes)
            return params
        boxed = tuple(self._overwritten(name, init) for name, init in inits.items())
        params = tuple(nn.meta.unbox(value) for value in boxed)
        _check(inits, params, shapes)
        fresh = functools.cache(lambda: fresh_state(self.optimizer, params))

        def read(name: str) -> jax.Array:
            def init(key: jax.Array) -> Any:
                del key
                value = fresh()[name]
                # A slot shaped like its table is laid out like it.
                twins = zip(boxed, params, strict=True)
                box = next((box for box, param in twins if param.shape == value.shape), value)
                return nn.meta.replace_boxed(box, value)

            return nn.meta.unbox(self._overwritten(name, init))

        return fused_table(self.optimizer, params, read)

    def _overwritten(self, name: str, init: Callable[[jax.Array], Any]) -> Any:
        """Value, boxed if its initialiser boxes it, of a variable that TrainState overwrites."""
        variable = self.variable(
            OVERWRITE_WITH_GRADIENT, name, lambda: init(self.make_rng("params")), unbox=False
        )
        return variable.value


def _check(names: Any, params: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    for name, param, shape in zip(names, params, shapes, strict=True):
        check_value(name, param, shape)
