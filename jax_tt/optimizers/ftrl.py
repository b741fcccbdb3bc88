"""FTRL-proximal."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Hyper, Optimizer, Scalar, Slot, Slots, check_numbers


@dataclasses.dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularised leader: rows are computed anew from sums of gradients, and L1 makes entries exactly zero.

    ``new = sum + g**2; linear += g - (new**k - sum**k) / learning_rate * w; sum = new;``
    ``w = (clip(linear, -l1, l1) - linear) / ((sum**k + beta) / learning_rate + 2 * l2)`` with
    ``k = -learning_rate_power``. With ``multiply_linear_by_learning_rate``, ``linear`` stores the product with the
    learning rate, which may then change from step to step without changing rows. The arguments are those of
    ``FTRLOptimizerSpec`` of jax-tpu-embedding. In steps with a learning rate of 0, only ``sum`` changes.

    Only a part of the initial value of a row enters the first step, so that the initial values should be near zero.
    For tensor trains, where a row is a product of slices, this and the zeros of L1 make little sense.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.
        learning_rate_power: exponent of the sum, at most 0.
        l1_regularization_strength: ``l1``.
        l2_regularization_strength: ``l2``.
        beta: added to the power of the sum.
        initial_accumulator_value: initial value of ``sum``.
        initial_linear_value: initial value of ``linear``.
        multiply_linear_by_learning_rate: whether ``linear`` is stored as a product with the learning rate.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.FTRL(0.1, l1_regularization_strength=0.01).slots]
    ['sum', 'linear']
    """

    learning_rate: Scalar
    learning_rate_power: Scalar = -0.5
    l1_regularization_strength: Scalar = 0.0
    l2_regularization_strength: Scalar = 0.0
    beta: Scalar = 0.0
    initial_accumulator_value: float = 0.1
    initial_linear_value: float = 0.0
    multiply_linear_by_learning_rate: bool = False
    native_kind: ClassVar[str] = "Ftrl"
    elementwise: ClassVar[bool] = True
    initial: ClassVar[frozenset[str]] = frozenset(
        {"initial_accumulator_value", "initial_linear_value"}
    )
    static: ClassVar[frozenset[str]] = frozenset({"multiply_linear_by_learning_rate"})

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", "beta", "initial_accumulator_value")
        check_numbers(self, "l1_regularization_strength", "l2_regularization_strength")
        check_numbers(self, "learning_rate_power", within="(-inf, 0]")
        check_numbers(self, "initial_linear_value", within="(-inf, inf)")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("sum", False, self.initial_accumulator_value),
            Slot("linear", False, self.initial_linear_value),
        )

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        values = super().hyperparameters(step)
        lr = values["learning_rate"]
        one = jnp.ones_like(lr)
        # The unit of the linear term, and that unit divided by the learning rate.
        unit, per_rate = (
            (lr, one)
            if self.multiply_linear_by_learning_rate
            else (one, jnp.where(lr == 0, 0, 1 / jnp.where(lr == 0, 1, lr)))
        )
        return {
            **values,
            "unit": unit,
            "unit_over_rate": per_rate,
            "l1": values["l1_regularization_strength"] * unit,
            "l2": 2 * values["l2_regularization_strength"] * unit,
            "exponent": -values["learning_rate_power"],
        }

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        (total, linear), exponent = slots, hyper["exponent"]
        lr, l1, per_rate = hyper["learning_rate"], hyper["l1"], hyper["unit_over_rate"]
        new = total + grads * grads
        # A root of 0 is exact only as a square root.
        before, now = (
            jnp.where(exponent == 0.5, jnp.sqrt(x), jnp.power(x, exponent)) for x in (total, new)
        )
        moved = linear + hyper["unit"] * grads - (now - before) * per_rate * rows
        divisor = (now + hyper["beta"]) * per_rate + hyper["l2"]
        # Without any regularisation: entries without a gradient so far.
        none = divisor == 0
        at = (jnp.clip(moved, -l1, l1) - moved) / jnp.where(none, 1, divisor)
        still = (lr == 0) | none
        return jnp.where(still, rows, at), (new, jnp.where(lr == 0, linear, moved))
