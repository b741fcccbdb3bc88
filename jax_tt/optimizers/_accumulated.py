"""The common part of Adagrad and row-wise Adagrad."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Optimizer, Scalar, Slot, at_step, check_number, check_scalar


@dataclasses.dataclass(frozen=True)
class Accumulated(Optimizer):
    """Hyper-parameters and slot of a rule that accumulates squares."""

    learning_rate: Scalar
    eps: Scalar = 1e-10
    initial_accumulator_value: float = 0.0
    rowwise: ClassVar[bool]
    initial: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})

    def __post_init__(self) -> None:
        check_scalar("learning_rate", self.learning_rate, 0.0)
        check_scalar("eps", self.eps, 0.0)
        check_number("initial_accumulator_value", self.initial_accumulator_value, 0.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", self.rowwise, self.initial_accumulator_value),)

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        return jnp.stack([at_step(self.learning_rate, step), at_step(self.eps, step)])


def scaled(grads: jax.Array, total: jax.Array, hyper: jax.Array) -> jax.Array:
    """The step ``learning_rate * grads / (sqrt(total) + eps)``."""
    lr, eps = hyper.astype(grads.dtype)
    root = jnp.sqrt(total) + eps
    # With eps = 0: gradients that are all 0, or whose squares underflow.
    return jnp.where(root == 0, 0, lr * grads / root)
