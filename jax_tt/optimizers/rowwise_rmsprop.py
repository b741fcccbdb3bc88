"""RMSProp with one second moment per row and automatic regularisation."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import (
    Optimizer,
    Scalar,
    Slot,
    Slots,
    check_scalars,
    interval,
    stacked,
    this_step,
)
from jax_tt.optimizers.adagrad import scaled


@dataclasses.dataclass(frozen=True)
class RowWiseRMSProp(Optimizer):
    """``v = decay * v + (1 - decay) * mean(g**2); w = keep * w - learning_rate * g / (sqrt(v) + eps)``.

    There is one ``v`` per row and no bias correction. With ``ar_alpha``, rows shrink by how long they were not used:
    ``keep = max(min_shrinkage, 1 - clip(learning_rate * ar_alpha * n, 0, 1))``, where ``n`` is the number of steps
    since the last use, and 1 at the first. It is ``ROWWISE_RMSPROP_AR`` of FBGEMM's table-batched embedding;
    ``optax.rmsprop`` has one ``v`` per entry. After 16,777,216 steps of the table, where the counting of steps ends,
    ``n`` is 1.

    A slice of a tensor-train core is used by many rows of the table, and so its ``n`` is usually near 1.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.
        decay: decay of ``v``.
        eps: added to the square root of ``v``.
        ar_alpha: strength of the regularisation.
        min_shrinkage: the smallest factor of a row in one step.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.RowWiseRMSProp(0.01, ar_alpha=0.1).slots]
    ['nu', 'last_step']
    """

    learning_rate: Scalar
    decay: Scalar = 0.99
    eps: Scalar = 1e-8
    ar_alpha: Scalar = 0.0
    min_shrinkage: Scalar = 0.1
    native_kind: ClassVar[str] = "RowWiseRmsProp"

    def __post_init__(self) -> None:
        check_scalars(self, "learning_rate", "eps", "ar_alpha", "min_shrinkage")
        check_scalars(self, "decay", high=1.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("nu", True, 0.0), Slot("last_step", True, 0.0))

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        given = (self.learning_rate, self.decay, self.eps, self.ar_alpha, self.min_shrinkage)
        return stacked(step, *given, this_step(step))

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, decay, eps, alpha, low, now = hyper.astype(rows.dtype)
        nu, last = (slot.astype(rows.dtype) for slot in slots)
        nu = decay * nu + (1 - decay) * jnp.mean(grads * grads, axis=1)
        shrink = jnp.clip(lr * alpha * interval(last, now), 0, 1)
        keep = jnp.maximum(low, 1 - shrink)[:, None]
        step = scaled(grads, nu[:, None], jnp.stack([lr, eps]))
        return keep * rows - step, (nu, jnp.full_like(last, now))
