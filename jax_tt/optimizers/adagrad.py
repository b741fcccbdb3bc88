"""Adagrad with one accumulator per entry."""

import dataclasses
from typing import ClassVar

import jax

from jax_tt.optimizers._accumulated import Accumulated, scaled
from jax_tt.optimizers._base import Slots


@dataclasses.dataclass(frozen=True)
class Adagrad(Accumulated):
    """``s += g**2; w -= learning_rate * g / (sqrt(s) + eps)``.

    ``optax.adagrad`` divides by ``sqrt(s + eps)`` instead, and initialises its accumulator with 0.1. With ``eps`` near
    0 and equal initial values both give the same result.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        eps: added to the square root of the accumulator.
        initial_accumulator_value: initial value of ``s``.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.Adagrad(0.1).slots]
    ['sum']
    """

    native_kind: ClassVar[int] = 1
    rowwise: ClassVar[bool] = False

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0].astype(rows.dtype) + grads * grads
        return rows - scaled(grads, total, hyper), (total,)
