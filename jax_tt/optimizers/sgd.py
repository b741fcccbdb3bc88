"""Stochastic gradient descent."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Optimizer, Scalar, Slot, Slots, at_step, check_scalar


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """``w -= learning_rate * g``. Equal to ``optax.sgd``.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.

    >>> import jax_tt
    >>> jax_tt.optimizers.SGD(0.1).hyperparameters(0).shape
    (1,)
    """

    learning_rate: Scalar
    native_kind: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_scalar("learning_rate", self.learning_rate, 0.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return ()

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        return jnp.stack([at_step(self.learning_rate, step)])

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        return rows - hyper[0].astype(rows.dtype) * grads, slots
