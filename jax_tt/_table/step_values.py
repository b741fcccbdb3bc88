"""The arrays of an update: hyper-parameters, the inverse loss scale, and the seed of stochastic rounding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_scalar, mismatch
from jax_tt._base.dtypes import accumulator
from jax_tt._table.options import StepInputs, check_optimizer
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._table.wrapper import Wrapper, delegate
from jax_tt.optimizers._base import Optimizer


@functools.singledispatch
def step_values(table: Table, state: State, inputs: StepInputs) -> Any:
    """The arrays of an update of a table: scalars ``hyper`` by name, ``inv_scale``, and ``seed[2]``.

    The first two have the accumulator type, and the seed is 0 without stochastic rounding. Constants are arrays of
    numpy. Kinds with several updates register theirs.
    """
    update = table.update
    if update is None:
        return ()
    if update.shared and "sentinel" not in state:
        raise ValueError(
            f"{table.ids.label}a table of a collection was looked up on its own; it shares a sentinel with the "
            "other tables. Call the collection, or look it up without an optimizer, "
            "jax_tt.extension.with_update(table, None)."
        )
    # Schedules and rounding depend on the step, but must not give it a cotangent.
    step, accum = jax.lax.stop_gradient(state["step"]), accumulator(table.spec.storage(state))
    rule = update.optimizer
    if inputs.hyperparameters:
        rule = rule.with_hyperparameters(inputs.hyperparameters)
    inverse: Any = np.ones((), accum)
    if inputs.grad_scale is not None:
        scale = jnp.asarray(as_scalar("grad_scale", inputs.grad_scale), accum)
        inverse = 1 / jax.lax.stop_gradient(scale)
    if inputs.key is not None:
        _check(inputs.key)
    seed: Any = np.zeros(2, np.uint32)
    if update.rounds_stochastically(table.spec.rounded_type or table.spec.storage(state)):
        # Two words that depend only on the key and the step.
        key = jax.random.key(0, impl="threefry2x32") if inputs.key is None else inputs.key
        step_key = jax.random.fold_in(key, step.astype(jnp.uint32))
        seed = jax.random.bits(step_key, (2,), jnp.uint32)
    hyper: Any = rule.hyperparameters(step.astype(accum))
    label = f"optimizer: {type(rule).__name__}.hyperparameters"
    if not isinstance(hyper, Mapping):
        expected = "a dict of scalars by name, as Optimizer.hyperparameters returns it"
        raise mismatch(label, hyper, expected)
    for name, value in hyper.items():
        scalar = getattr(value, "shape", None) == () and value.dtype == accum
        if type(name) is not str or not scalar:
            expected = f"a scalar of type {jnp.dtype(accum)} by name, as jax_tt.optimizers.at_step returns it"
            raise mismatch(f"{label}: {name!r}", value, expected)
    return {
        "hyper": {
            name: value if isinstance(value, np.generic) else jax.lax.stop_gradient(value)
            for name, value in hyper.items()
        },
        "inv_scale": inverse,
        "seed": seed,
    }


delegate(Wrapper, step_values)


def _check(key: Any) -> None:
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or key.shape != ():
        got = getattr(key, "dtype", type(key).__name__)
        raise TypeError(f"key: got {got}; expected one typed key, jax.random.key(seed).")


@dataclasses.dataclass(frozen=True)
class _TakenOut:
    """Placeholder in a static optimizer for a value that is not static."""

    name: str

    def __call__(self, step: Any) -> Any:
        raise ValueError(
            f"{self.name}: is a variable of the layer that this rule belongs to, and only its calls read it; make "
            "another rule for other uses."
        )


def hoisted(optimizer: Any, found: Callable[[Any], bool]) -> tuple[Optimizer, dict[str, Any]]:
    """The optimizer without the hyper-parameters for which ``found`` holds, and these by name."""
    check_optimizer(optimizer)
    names = optimizer.hyperparameter_names()
    values = {name: value for name in names if found(value := getattr(optimizer, name))}
    if not values:
        return optimizer, {}
    return optimizer.with_hyperparameters({name: _TakenOut(name) for name in values}), values
