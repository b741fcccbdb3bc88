"""RMSProp with one second moment per row and automatic regularisation."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import (
    Hyper,
    Optimizer,
    Scalar,
    Slot,
    Slots,
    check_numbers,
    interval,
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
        check_numbers(self, "learning_rate", "eps", "ar_alpha", "min_shrinkage")
        check_numbers(self, "decay", within="[0, 1)")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("nu", True, 0.0), Slot("last_step", True, 0.0))

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        return {**super().hyperparameters(step), "step": this_step(step)}

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        (nu, last), decay, now = slots, hyper["decay"], hyper["step"]
        nu = decay * nu + (1 - decay) * jnp.mean(grads * grads, axis=1)
        shrink = jnp.clip(hyper["learning_rate"] * hyper["ar_alpha"] * interval(last, now), 0, 1)
        keep = jnp.maximum(hyper["min_shrinkage"], 1 - shrink)[:, None]
        return keep * rows - scaled(grads, nu[:, None], hyper), (nu, jnp.full_like(last, now))
