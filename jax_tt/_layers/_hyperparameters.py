"""Hyper-parameters of a layer's rule that are variables of the layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_tt._arguments import as_scalar
from jax_tt.optimizers import Optimizer


@dataclasses.dataclass(frozen=True)
class _InVariable:
    """Stands in the rule of a layer, which is part of the program, for a value that is not."""

    name: str

    def __call__(self, step: Any) -> Any:
        raise ValueError(
            f"{self.name}: is a variable of the layer that this rule belongs to, and only its calls read it; make "
            "another rule for other uses."
        )


def hoisted(optimizer: Any) -> tuple[Any, dict[str, nnx.Variable[Any]]]:
    """The rule without its variables, and those by name."""
    if not isinstance(optimizer, Optimizer):
        return optimizer, {}
    found = {
        name: value
        for name in optimizer.hyperparameter_names()
        if isinstance(value := getattr(optimizer, name), nnx.Variable)
    }
    for name, variable in found.items():
        if isinstance(variable, nnx.Param):
            raise TypeError(
                f"{name}: got a {type(variable).__name__}, which would be trained; expected an nnx.Variable, e.g. "
                f"{name}=nnx.Variable(jnp.float32(0.05))."
            )
        if isinstance(variable.get_value(), int | float):
            variable.set_value(jnp.asarray(variable.get_value(), jnp.float32))
        as_scalar(name, variable.get_value())
    return optimizer.with_hyperparameters({name: _InVariable(name) for name in found}), found
