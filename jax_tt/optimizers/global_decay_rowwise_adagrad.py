"""Row-wise Adagrad whose weight decay also makes up for the steps that did not use a row."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._accumulated import Accumulated, scaled
from jax_tt.optimizers._base import Scalar, Slot, Slots, at_step, check_scalar
from jax_tt.optimizers._counts import interval, this_step


@dataclasses.dataclass(frozen=True)
class GlobalDecayRowWiseAdagrad(Accumulated):
    """`RowWiseAdagrad` with decoupled weight decay of all rows in every step, applied when a row is used.

    With ``keep = 1 - learning_rate * weight_decay``, and ``n`` steps since the row was last used, its *late decay* is
    ``late = max(lower_bound, keep**(n - 1))``, and 1 at its first use. In training, lookups return ``late * w``. The
    step is ``s += mean(g**2); w = keep * late * w - learning_rate * g / (sqrt(s) + eps)``, where ``g`` is the gradient
    with respect to what the lookup returned. Up to the step before ``start``, counted from 1, ``late`` is 1, and no
    last use is recorded. It is ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM's table-batched embedding with
    ``WeightDecayMode.DECOUPLE_GLOBAL``.

    Lookups outside of training, those with ``Lookup(train=False)`` and of layers with ``deterministic=True``, return
    ``w`` as it is stored, as in FBGEMM. With a learning rate that changes, all missed steps have that of the current
    one. It is for dense tables.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        eps: added to the square root of the sum.
        initial_accumulator_value: initial value of ``s``.
        weight_decay: factor of the decay.
        lower_bound: the smallest late decay, below 1.
        start: the first step with late decay, counted from 1.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> rule = jax_tt.optimizers.GlobalDecayRowWiseAdagrad(0.5, weight_decay=0.5)
    >>> table = jax_tt.functional.init_fused(jnp.ones((4, 1)), rule)
    >>> def loss(table, ids):
    ...     return 0.0 * jax_tt.functional.fused_embed_bag(table, ids, rule).sum()
    >>> for row in (3, 1, 1, 3):
    ...     table = jax.grad(loss)(table, jnp.array([[row]]))
    >>> [round(x, 4) for x in table.cores[0].ravel().tolist()]
    [1.0, 0.5625, 1.0, 0.3164]
    """

    weight_decay: Scalar = 0.0
    lower_bound: Scalar = 0.0
    start: Scalar = 0.0
    native_kind: ClassVar[int] = 16
    rowwise: ClassVar[bool] = True
    scales_reads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scalar("weight_decay", self.weight_decay, 0.0)
        check_scalar("lower_bound", self.lower_bound, 0.0, 1.0)
        check_scalar("start", self.start, 0.0)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*super().slots, Slot("last_step", True, 0.0))

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        lr, eps = super().hyperparameters(step)
        keep = 1 - lr * at_step(self.weight_decay, step)
        given = [at_step(value, step) for value in (self.lower_bound, self.start)]
        return jnp.stack([lr, eps, keep, *given, this_step(step)])

    def read_scale(self, slots: Slots, hyper: jax.Array) -> jax.Array:
        _, _, keep, low, start, now = hyper.astype(slots[1].dtype)
        late = jnp.maximum(low, jnp.power(keep, interval(slots[1], now) - 1))
        return jnp.where(now < start, 1, late)

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        slots = tuple(slot.astype(rows.dtype) for slot in slots)
        total, last = slots
        late = self.read_scale(slots, hyper)[:, None]
        _, _, keep, _, start, now = hyper.astype(rows.dtype)
        total = total + jnp.mean(grads * grads, axis=1)
        new = keep * late * rows - scaled(grads, total[:, None], hyper[:2])
        return new, (total, jnp.where(now < start, last, now))

    def check_width(self, width: int | None) -> None:
        if width is None:
            raise TypeError(
                "optimizer: got GlobalDecayRowWiseAdagrad; it is for dense tables. The rows of a tensor train share "
                "slices of its cores, so that none of them decays alone: use RowWiseAdagrad with a weight_decay."
            )
