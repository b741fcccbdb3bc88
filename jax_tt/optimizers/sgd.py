"""Stochastic gradient descent, plain and with layer-wise adaptive rates."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Hyper, Optimizer, Scalar, Slot, Slots, check_numbers


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """``w -= learning_rate * g``. Equal to ``optax.sgd``.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.

    >>> import jax_tt
    >>> float(jax_tt.optimizers.SGD(lambda step: 1 / (step + 1)).hyperparameters(3)["learning_rate"])
    0.25
    """

    learning_rate: Scalar
    native_kind: ClassVar[str] = "Sgd"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return ()

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        return rows - hyper["learning_rate"] * grads, slots


@dataclasses.dataclass(frozen=True)
class LARSSGD(Optimizer):
    """SGD with momentum whose learning rate follows the norms of the row.

    ``a = learning_rate * eta * norm(w) / (norm(g) + weight_decay * norm(w));``
    ``m = momentum * m + a * (g + weight_decay * w); w -= m``. Where ``norm(w)`` is zero, ``a`` is the learning rate
    itself. It is ``LARS_SGD`` of FBGEMM's table-batched embedding, where such a row stays zero. ``optax.lars`` takes
    the norms over a whole array, divides by the norm of ``g + weight_decay * w``, and multiplies by the learning rate
    after the momentum instead of before.

    A row of a tensor-train core is its slice ``core[k][i]``, which several rows of the table share.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.
        eta: the trust coefficient.
        momentum: decay of ``m``.
        weight_decay: multiple of the row that is added to its gradient.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.LARSSGD(0.1).slots]
    ['momentum']
    """

    learning_rate: Scalar
    eta: Scalar = 0.001
    momentum: Scalar = 0.9
    weight_decay: Scalar = 0.0
    native_kind: ClassVar[str] = "LarsSgd"

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", "eta", "weight_decay")
        check_numbers(self, "momentum", within="[0, 1)")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("momentum", False, 0.0),)

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        decay = hyper["weight_decay"]
        weights = jnp.linalg.norm(rows, axis=1, keepdims=True)
        steps = jnp.linalg.norm(grads, axis=1, keepdims=True) + decay * weights
        none = (weights == 0) | (steps == 0)
        trust = jnp.where(none, 1, hyper["eta"] * weights / jnp.where(none, 1, steps))
        rate = hyper["learning_rate"] * trust
        velocity = hyper["momentum"] * slots[0] + rate * (grads + decay * rows)
        return rows - velocity, (velocity,)
