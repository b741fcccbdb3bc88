"""Adagrad with one accumulator per row."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Optimizer, Scalar, Slot, Slots, at_step, check_scalar


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """``s += mean(g**2); w -= learning_rate * g / (sqrt(s) + eps)`` with one ``s`` per row.

    The row of a tensor-train core is its slice ``core[k][i]``; the mean runs over the slice.

    Args:
        learning_rate: float, scalar array or schedule of the step.
        eps: added to the root of the accumulator.
        initial_accumulator_value: start of ``s``.

    >>> import jax_tt
    >>> jax_tt.optimizers.RowWiseAdagrad(0.1).slots[0].rowwise
    True
    """

    learning_rate: Scalar
    eps: Scalar = 1e-10
    initial_accumulator_value: float = 0.0
    native_kind: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_scalar("learning_rate", self.learning_rate, 0.0)
        check_scalar("eps", self.eps, 0.0)
        check_scalar("initial_accumulator_value", self.initial_accumulator_value, 0.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", True, self.initial_accumulator_value),)

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        return jnp.stack([at_step(self.learning_rate, step), at_step(self.eps, step)])

    @staticmethod
    def update_rows(
        rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, eps = hyper.astype(rows.dtype)
        total = slots[0].astype(rows.dtype) + jnp.mean(grads * grads, axis=1)
        # A row whose gradients were all 0 would step by 0 / 0 with eps = 0.
        step = jnp.where(grads == 0, 0, lr * grads / (jnp.sqrt(total) + eps)[:, None])
        return rows - step, (total,)
