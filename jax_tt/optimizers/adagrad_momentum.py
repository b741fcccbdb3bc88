"""Adagrad with momentum."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import (
    Optimizer,
    Scalar,
    Slot,
    Slots,
    at_step,
    check_number,
    check_scalars,
    check_that,
    stacked,
)


@dataclasses.dataclass(frozen=True)
class AdagradMomentum(Optimizer):
    """``s += g**2; p = (s + eps)**(-1 / exponent); m = momentum * m + p * g; w -= learning_rate * m``.

    With ``b2`` below 1 the squares are averaged: ``s = b2 * s + (1 - b2) * g**2``. With ``nesterov`` the step is
    ``w -= learning_rate * (momentum * m + p * g)``. The formulas are those of ``AdagradMomentumOptimizerSpec`` of
    jax-tpu-embedding; optax has no counterpart. Moments change only when their row is used.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        momentum: decay of ``m``.
        b2: decay of ``s``; 1 for a sum.
        eps: added to ``s``.
        exponent: 2 for the square root of Adagrad.
        nesterov: whether the step looks ahead.
        initial_accumulator_value: initial value of ``s``.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.AdagradMomentum(0.1).slots]
    ['sum', 'momentum']
    """

    learning_rate: Scalar
    momentum: Scalar = 0.9
    b2: Scalar = 1.0
    eps: Scalar = 1e-10
    exponent: Scalar = 2.0
    nesterov: bool = False
    initial_accumulator_value: float = 0.1
    native_kind: ClassVar[int] = 13
    initial: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})
    static: ClassVar[frozenset[str]] = frozenset({"nesterov"})

    def __post_init__(self) -> None:
        check_scalars(self, "learning_rate", "eps")
        check_scalars(self, "momentum", high=1.0)
        check_that("b2", self.b2, lambda x: 0 <= x <= 1, "a number from 0 to 1")
        check_that("exponent", self.exponent, lambda x: x > 0, "a number above 0")
        check_number("initial_accumulator_value", self.initial_accumulator_value, 0.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", False, self.initial_accumulator_value), Slot("momentum", False, 0.0))

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        b2, exponent = at_step(self.b2, step), at_step(self.exponent, step)
        decays = (self.momentum, b2, jnp.where(b2 == 1, 1, 1 - b2))
        return stacked(step, self.learning_rate, *decays, self.eps, -1 / exponent, self.nesterov)

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, momentum, b2, gain, eps, power, _ = hyper.astype(rows.dtype)
        total, mean = (slot.astype(rows.dtype) for slot in slots)
        total = b2 * total + gain * grads * grads
        # With eps = 0: entries without a gradient so far, or one whose square underflows.
        none = total + eps == 0
        scale = jnp.where(none, 0, jnp.power(jnp.where(none, 1, total + eps), power))
        mean = momentum * mean + scale * grads
        step = momentum * mean + scale * grads if self.nesterov else mean
        return rows - lr * step, (total, mean)
