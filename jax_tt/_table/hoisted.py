"""Takes hyper-parameters that are not static out of an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_tt._table.options import StepInputs, Update, check_optimizer
from jax_tt.optimizers._base import Optimizer, is_array


@dataclasses.dataclass(frozen=True)
class _TakenOut:
    """Placeholder in a static optimizer for a value that is not static."""

    name: str

    def __call__(self, step: Any) -> Any:
        raise ValueError(
            f"{self.name}: is a variable of the layer that this rule belongs to, and only its calls read it; make "
            "another rule for other uses."
        )


def hoisted(
    optimizer: Any, found: Callable[[Any], bool] = is_array
) -> tuple[Optimizer, dict[str, Any]]:
    """The optimizer without the hyper-parameters for which ``found`` holds, arrays by default, and these by name."""
    check_optimizer(optimizer)
    names = optimizer.hyperparameter_names()
    values = {name: value for name in names if found(value := getattr(optimizer, name))}
    if not values:
        return optimizer, {}
    return optimizer.with_hyperparameters({name: _TakenOut(name) for name in values}), values


def fused_update(
    optimizer: Any,
    *,
    grad_scale: Any = None,
    key: Any = None,
    skip_nonfinite: bool = False,
    stochastic_rounding: bool = True,
    max_gradient: float | None = None,
) -> tuple[Update, StepInputs]:
    """The static description and the arrays of an update, from the options of the functional ops."""
    rule, values = hoisted(optimizer)
    update = Update(rule, skip_nonfinite, stochastic_rounding, max_gradient)
    return update, StepInputs(grad_scale, key, values)
