"""Lion as an update rule of jax_tt, in C++ and CUDA."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

import jax_tt
from jax_tt.optimizers import Optimizer, Slot
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

    def update_rows(self, rows, grads, slots, hyper):
        """The same in plain JAX: for ``method="reference"``, and for platforms without kernels."""
        (momentum,), b1, b2 = slots, hyper["b1"], hyper["b2"]
        direction = jnp.sign(b1 * momentum + (1 - b1) * grads)
        step = hyper["learning_rate"] * (direction + hyper["weight_decay"] * rows)
        return rows - step, (b2 * momentum + (1 - b2) * grads,)
