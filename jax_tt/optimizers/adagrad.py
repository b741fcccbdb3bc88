"""Adagrad, with one accumulator per entry or per row."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Optimizer, Scalar, Slot, Slots, at_step, check_scalar


@dataclasses.dataclass(frozen=True)
class _Accumulated(Optimizer):
    """What the two rules share."""

    learning_rate: Scalar
    eps: Scalar = 1e-10
    initial_accumulator_value: float = 0.0
    rowwise: ClassVar[bool]

    def __post_init__(self) -> None:
        check_scalar("learning_rate", self.learning_rate, 0.0)
        check_scalar("eps", self.eps, 0.0)
        if callable(self.initial_accumulator_value):
            raise TypeError("initial_accumulator_value: got a function; expected a number.")
        check_scalar("initial_accumulator_value", self.initial_accumulator_value, 0.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", self.rowwise, self.initial_accumulator_value),)

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        return jnp.stack([at_step(self.learning_rate, step), at_step(self.eps, step)])


def _scaled(grads: jax.Array, total: jax.Array, hyper: jax.Array) -> jax.Array:
    lr, eps = hyper.astype(grads.dtype)
    root = jnp.sqrt(total) + eps
    # With eps = 0: gradients that are all 0, or whose squares underflow.
    return jnp.where(root == 0, 0, lr * grads / root)


@dataclasses.dataclass(frozen=True)
class Adagrad(_Accumulated):
    """``s += g**2; w -= learning_rate * g / (sqrt(s) + eps)``.

    ``optax.adagrad`` divides by ``sqrt(s + eps)`` instead and starts its accumulator at 0.1: with
    ``eps`` near 0 and equal initial values the two agree.

    Args:
        learning_rate: float, scalar array or schedule of the step.
        eps: added to the root of the accumulator.
        initial_accumulator_value: start of ``s``.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.Adagrad(0.1).slots]
    ['sum']
    """

    native_kind: ClassVar[int] = 1
    rowwise: ClassVar[bool] = False

    @staticmethod
    def update_rows(
        rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0].astype(rows.dtype) + grads * grads
        return rows - _scaled(grads, total, hyper), (total,)


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(_Accumulated):
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

    native_kind: ClassVar[int] = 2
    rowwise: ClassVar[bool] = True

    @staticmethod
    def update_rows(
        rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0].astype(rows.dtype) + jnp.mean(grads * grads, axis=1)
        return rows - _scaled(grads, total[:, None], hyper), (total,)
