"""Lion as an update rule of jax_tt, in C++ and CUDA."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

import jax_tt
from jax_tt.optimizers import Optimizer, Slot, at_step
from lion_rule import _lion


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """``w -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * w); m = b2 * m + (1 - b2) * g``.

    Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675. Equal to ``optax.lion`` if every row
    is used in every step.

    Args:
        learning_rate: float, scalar array or schedule of the step; usually a third to a tenth of that of Adam.
        b1, b2: weights of the momentum in the direction of a step, and in the next momentum.
        weight_decay: multiplied by the learning rate; only rows of the batch decay.
    """

    learning_rate: float = 1e-4
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.0
    native_kind: ClassVar[str] = jax_tt.optimizers.register(_lion.rule)

    @property
    def slots(self):
        return (Slot("momentum", rowwise=False, init=0.0),)

    def hyperparameters(self, step):
        values = (self.learning_rate, self.b1, self.b2, self.weight_decay)
        return jnp.stack([at_step(value, step) for value in values])

    def update_rows(self, rows, grads, slots, hyper):
        """The same in plain JAX: for ``method="reference"``, and for platforms without kernels."""
        lr, b1, b2, decay = hyper.astype(rows.dtype)
        momentum = slots[0].astype(rows.dtype)
        direction = jnp.sign(b1 * momentum + (1 - b1) * grads)
        return rows - lr * (direction + decay * rows), (b2 * momentum + (1 - b2) * grads,)
