"""Adam with one second moment per row."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Slot, Slots
from jax_tt.optimizers._moments import Moments, adaptive, compensating, moment


@dataclasses.dataclass(frozen=True)
class PartialRowWiseAdam(Moments):
    """Adam whose second moment is one number per row: ``v = b2 v + (1 - b2) mean(g**2)``.

    ``m = b1 m + (1 - b1) g;``
    ``w -= learning_rate * ((m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * w)``, where ``t`` counts
    all steps of the table. The moments change only when their row is used. The state is about half of that of `Adam`.
    It is ``PARTIAL_ROWWISE_ADAM`` of FBGEMM's table-batched embedding; optax has no counterpart.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        b1, b2: decay of the first and second moment.
        eps: added to the square root of the second moment.
        weight_decay: multiplied by the learning rate; only rows of the batch decay.
        moment_dtype: type of the first moment, ``"float32"`` or ``"bfloat16"``. It is computed in float32; bfloat16 is
            rounded stochastically, unless the table switches that off.

    >>> import jax_tt
    >>> [(slot.name, slot.rowwise) for slot in jax_tt.optimizers.PartialRowWiseAdam(1e-3).slots]
    [('mu', False), ('nu', True)]
    """

    native_kind: ClassVar[int] = 4

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.moment_slot("mu"), Slot("nu", True, 0.0))

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, b1, b2, eps, decay, *corrections = hyper.astype(rows.dtype)
        mu = moment(b1, slots[0], grads)
        nu = moment(b2, slots[1], jnp.mean(grads * grads, axis=1))
        step = adaptive(mu, nu[:, None], corrections, eps) + decay * rows
        return rows - lr * step, (mu, nu)

    def compensated(
        self, slots: Slots, errors: jax.Array, spacing: jax.Array, hyper: jax.Array
    ) -> Slots:
        mu, nu = slots
        moments = mu, nu[:, None]
        return (compensating(*moments, list(hyper[5:]), errors, spacing, hyper), nu)
