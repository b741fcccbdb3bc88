"""Adam on the rows of a batch."""

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
    check_scalar,
    one_minus_power,
)


@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    """Adam whose moments change only when their row is used ("lazy").

    ``m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g**2;``
    ``w -= learning_rate * (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps)``, where ``t`` counts
    all steps of the table. ``optax.adam`` also decays the moments of rows that a batch does not use, and moves these
    rows. If every row is used in every step, the two are equal.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        b1, b2: decay of the first and second moment.
        eps: added to the square root of the second moment.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.Adam(1e-3).slots]
    ['mu', 'nu']
    """

    learning_rate: Scalar
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8
    native_kind: ClassVar[int] = 3

    def __post_init__(self) -> None:
        check_scalar("learning_rate", self.learning_rate, 0.0)
        check_scalar("b1", self.b1, 0.0, 1.0)
        check_scalar("b2", self.b2, 0.0, 1.0)
        check_scalar("eps", self.eps, 0.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("mu", False, 0.0), Slot("nu", False, 0.0))

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        t = jnp.asarray(step, jnp.float32) + 1
        scalars = [
            at_step(value, step) for value in (self.learning_rate, self.b1, self.b2, self.eps)
        ]
        corrections = [one_minus_power(base, t, step) for base in (self.b1, self.b2)]
        return jnp.stack([*scalars, *corrections])

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, b1, b2, eps, correction1, correction2 = hyper.astype(rows.dtype)
        mu = b1 * slots[0].astype(rows.dtype) + (1 - b1) * grads
        nu = b2 * slots[1].astype(rows.dtype) + (1 - b2) * grads * grads
        root = jnp.sqrt(nu / correction2) + eps
        # With eps = 0: entries without a gradient so far, or one whose square underflows.
        step = jnp.where(root == 0, 0, lr * (mu / correction1) / root)
        return rows - step, (mu, nu)
