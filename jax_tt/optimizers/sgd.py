"""Stochastic gradient descent, plain and with layer-wise adaptive rates."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Optimizer, Scalar, Slot, Slots, check_scalars, stacked


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """``w -= learning_rate * g``. Equal to ``optax.sgd``.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.

    >>> import jax_tt
    >>> jax_tt.optimizers.SGD(0.1).hyperparameters(0).shape
    (1,)
    """

    learning_rate: Scalar
    native_kind: ClassVar[str] = "Sgd"
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scalars(self, "learning_rate")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return ()

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        return stacked(step, self.learning_rate)

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        return rows - hyper[0].astype(rows.dtype) * grads, slots


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
        check_scalars(self, "learning_rate", "eta", "weight_decay")
        check_scalars(self, "momentum", high=1.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("momentum", False, 0.0),)

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        return stacked(step, self.learning_rate, self.eta, self.momentum, self.weight_decay)

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, eta, momentum, decay = hyper.astype(rows.dtype)
        weights = jnp.linalg.norm(rows, axis=1, keepdims=True)
        steps = jnp.linalg.norm(grads, axis=1, keepdims=True) + decay * weights
        none = (weights == 0) | (steps == 0)
        rate = lr * jnp.where(none, 1, eta * weights / jnp.where(none, 1, steps))
        velocity = momentum * slots[0].astype(rows.dtype) + rate * (grads + decay * rows)
        return rows - velocity, (velocity,)
