"""LAMB on the rows of a batch."""

import dataclasses
from typing import ClassVar

import jax

from jax_tt.optimizers._base import Slot, Slots
from jax_tt.optimizers._moments import Moments, adaptive, moment, norm_ratio


@dataclasses.dataclass(frozen=True)
class LAMB(Moments):
    """Adam whose step has the norm of the row: ``w -= learning_rate * (norm(w) / norm(r)) * r``.

    ``r = (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * w`` with the moments of `Adam`, which
    change only when their row is used; ``t`` counts all steps of the table. The ratio is 1 if either norm is zero.
    ``optax.lamb`` has the same formula and takes the norms over a whole array instead of a row. It is ``LAMB`` of
    FBGEMM's table-batched embedding, which divides by zero there.

    A row of a tensor-train core is its slice ``core[k][i]``, which several rows of the table share.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        b1, b2: decay of the first and second moment.
        eps: added to the square root of the second moment.
        weight_decay: part of the step before it is scaled; only rows of the batch decay.
        moment_dtype: type of the moments, ``"float32"`` or ``"bfloat16"``. They are computed in float32; bfloat16 is
            rounded stochastically, unless the table switches that off.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.LAMB(1e-3, weight_decay=0.01).slots]
    ['mu', 'nu']
    """

    native_kind: ClassVar[int] = 5

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.moment_slot("mu"), self.moment_slot("nu"))

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, b1, b2, eps, decay, *corrections = hyper.astype(rows.dtype)
        mu, nu = moment(b1, slots[0], grads), moment(b2, slots[1], grads * grads)
        step = adaptive(mu, nu, corrections, eps) + decay * rows
        return rows - lr * norm_ratio(rows, step) * step, (mu, nu)
