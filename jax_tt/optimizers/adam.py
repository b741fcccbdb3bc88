"""Adam on the rows of a batch."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Slot, Slots, is_zero, log_of
from jax_tt.optimizers._counts import one_more
from jax_tt.optimizers._moments import Moments, adaptive, compensating, moment


@dataclasses.dataclass(frozen=True)
class Adam(Moments):
    """Adam whose moments change only when their row is used ("lazy").

    ``m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g**2;``
    ``w -= learning_rate * ((m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * w)``, where ``t`` counts
    all steps of the table. ``optax.adam`` also decays the moments of rows that a batch does not use, and moves these
    rows. If every row is used in every step, the two are equal, and with weight decay it is ``optax.adamw``.

    In the steps of a `QuantizedTable`, the first moment also makes up for the errors of stochastic rounding.

    With ``rowwise_bias_correction``, ``t`` counts the steps of the row, in one more slot. The count stops at
    16,777,216, where both corrections are 1 for any usual decay.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        b1, b2: decay of the first and second moment.
        eps: added to the square root of the second moment.
        weight_decay: multiplied by the learning rate; only rows of the batch decay.
        moment_dtype: type of the moments, ``"float32"`` or ``"bfloat16"``. They are computed in float32; bfloat16 is
            rounded stochastically, unless the table switches that off.
        rowwise_bias_correction: whether ``t`` is counted for every row.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.Adam(1e-3).slots]
    ['mu', 'nu']
    >>> rule = jax_tt.optimizers.Adam(1e-3, weight_decay=0.01, rowwise_bias_correction=True)
    >>> [slot.name for slot in rule.slots]
    ['mu', 'nu', 'count']
    """

    rowwise_bias_correction: bool = False
    native_kind: ClassVar[int] = 3
    decayed_kind: ClassVar[int] = 9
    rowwise_kind: ClassVar[int] = 10
    static: ClassVar[frozenset[str]] = Moments.static | {"rowwise_bias_correction"}

    @property
    def kind(self) -> int:
        if self.rowwise_bias_correction:
            return self.rowwise_kind
        return self.native_kind if is_zero(self.weight_decay) else self.decayed_kind

    @property
    def slots(self) -> tuple[Slot, ...]:
        moments = (self.moment_slot("mu"), self.moment_slot("nu"))
        return (*moments, Slot("count", True, 0.0)) if self.rowwise_bias_correction else moments

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        values = super().hyperparameters(step)
        if self.kind == self.rowwise_kind:
            logs = [log_of(base, step) for base in (self.b1, self.b2)]
            return jnp.concatenate([values[:5], jnp.stack(logs)])
        if self.kind == self.native_kind:
            return jnp.concatenate([values[:4], values[5:]])
        return values

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, b1, b2, eps, *rest = hyper.astype(rows.dtype)
        mu = moment(b1, slots[0], grads)
        nu = b2 * slots[1].astype(rows.dtype) + (1 - b2) * grads * grads
        if self.kind == self.native_kind:
            return rows - adaptive(mu, nu, rest, eps, lr), (mu, nu)
        new: Slots = (mu, nu)
        if self.kind == self.rowwise_kind:
            new = (mu, nu, one_more(slots[2].astype(rows.dtype)))
        step = adaptive(mu, nu, self._corrections(new, rest), eps)
        return rows - lr * (step + rest[0] * rows), new

    def compensated(
        self, slots: Slots, errors: jax.Array, spacing: jax.Array, hyper: jax.Array
    ) -> Slots:
        mu, nu, *count = slots
        corrections = self._corrections(slots, list(hyper[4:]))
        return (compensating(mu, nu, corrections, errors, spacing, hyper), nu, *count)

    def _corrections(self, slots: Slots, rest: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Of both moments; ``slots`` are those after the step, ``rest`` are the hyper-parameters after ``eps``."""
        if self.kind == self.native_kind:
            return rest
        if self.kind == self.rowwise_kind:
            return [-jnp.expm1(slots[2] * log)[:, None] for log in rest[1:]]
        return rest[1:]
