"""The variables of one table in a linen module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._layers._initial import check_value
from jax_tt._layers._names import fresh_state, fused_table
from jax_tt._ops._table import FusedTable
from jax_tt._ops.out_of_range import add_out_of_range
from jax_tt._shape import TTShape

OUT_OF_RANGE, COUNT = "out_of_range", "count"


class TableModule(nn.Module):
    """Declares a table's parameters or, when it is fused, its overwritten variables."""

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """Hyper-parameters that are variables of the layer, which linen has none of: calls are given them."""
        return {}

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

    def _count_out_of_range(self, ids_or_bags: Any, rows: int | TTShape) -> None:
        # Not by `init`, whose result is differentiated as a whole by those who train fused tables.
        if self.bounds != "warn" or self.is_initializing():
            return
        if self.is_mutable_collection(OUT_OF_RANGE):
            total = self.get_variable(OUT_OF_RANGE, COUNT, jnp.zeros((), jnp.int32))
            total = add_out_of_range(total, ids_or_bags, rows, self.axis_name, self.label)
            self.put_variable(OUT_OF_RANGE, COUNT, total)

    def _overwritten(self, name: str, init: Callable[[jax.Array], Any]) -> Any:
        """Value, boxed if its initialiser boxes it, of a variable that TrainState overwrites."""
        # Where the collection is mutable, flax looks for the key that would make the variable, and says so.
        can_make = self.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
        if not can_make and not self.has_variable(OVERWRITE_WITH_GRADIENT, name):
            raise ValueError(
                f"{self.label}: the variables hold no {name} of this fused table in the collection "
                f"{OVERWRITE_WITH_GRADIENT}. Give apply, and the params of a TrainState, the whole dictionary that "
                "init returned, not variables['params']."
            )
        variable = self.variable(
            OVERWRITE_WITH_GRADIENT, name, lambda: init(self.make_rng("params")), unbox=False
        )
        return variable.value


def _check(names: Any, params: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...]) -> None:
    for name, param, shape in zip(names, params, shapes, strict=True):
        check_value(name, param, shape)
