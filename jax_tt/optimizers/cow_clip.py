"""Row-wise Adagrad with CowClip."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Scalar, Slots, at_step, check_decay, check_scalar
from jax_tt.optimizers._counted import Counted
from jax_tt.optimizers._counts import count_use, interval, this_step


@dataclasses.dataclass(frozen=True)
class CowClip(Counted):
    """Row-wise Adagrad whose gradient is clipped by the norm of the row and by how often the row was used.

    ``a = learning_rate / (sqrt(s) + eps)`` with ``s += mean(g**2)`` is multiplied by ``min(1, limit / norm(g))``, where
    ``limit = c * max(weight_norm_coefficient * norm(w), lower_bound)`` and ``c`` is the counter that
    `CounterRowWiseAdagrad` describes, with the same ``halflife``. Then ``w = keep * w - a * g``, where ``keep`` is 1,
    ``1 - a * weight_decay`` with ``weight_decay_mode="l2"``, and ``1 - learning_rate * weight_decay`` with
    ``"decoupled"``. With ``"l2"``, ``s`` and ``norm(g)`` are those of ``g + weight_decay * w``.

    It is ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM's table-batched embedding with ``WeightDecayMode.COWCLIP``, where
    ``weight_norm_coefficient`` and ``lower_bound`` are 0 unless given, so that nothing moves. The paper of CowClip
    (https://arxiv.org/abs/2204.06240) uses it with Adam and counts the uses in the batch, which is ``halflife=0`` where
    no id is duplicated. Counters stop at 16,777,216.

    A slice of a tensor-train core is used by many rows of the table: its counter says little about any of them.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        eps: added to the square root of the sum.
        initial_accumulator_value: initial value of ``s``.
        halflife: of a use in the counter, in steps; negative to count all, 0 to count only the current one.
        weight_decay: factor of the decay.
        weight_decay_mode: ``"none"``, ``"l2"`` or ``"decoupled"``.
        weight_norm_coefficient: limit of the norm of a gradient per norm of the row.
        lower_bound: limit where the row is nearly zero.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.CowClip(0.1).slots]
    ['sum', 'last_step', 'count']
    """

    weight_decay_mode: Literal["none", "l2", "decoupled"] = "none"
    weight_norm_coefficient: Scalar = 1.0
    lower_bound: Scalar = 1e-5
    native_kind: ClassVar[int] = 15
    static: ClassVar[frozenset[str]] = frozenset({"weight_decay_mode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self.weight_decay, self.weight_decay_mode)
        check_scalar("weight_norm_coefficient", self.weight_norm_coefficient, 0.0)
        check_scalar("lower_bound", self.lower_bound, 0.0)

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        decay, off = at_step(self.weight_decay, step), jnp.zeros((), jnp.float32)
        given = (
            self.learning_rate,
            self.eps,
            decay if self.weight_decay_mode == "l2" else off,
            decay if self.weight_decay_mode == "decoupled" else off,
            self.halflife,
            this_step(step),
            self.weight_norm_coefficient,
            self.lower_bound,
        )
        return jnp.stack([at_step(value, step) for value in given])

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, eps, l2, decay, halflife, now, coefficient, low = hyper.astype(rows.dtype)
        total, last, count = (slot.astype(rows.dtype) for slot in slots)
        count = count_use(count, halflife, interval(last, now))
        penalised = grads + l2 * rows
        total = total + jnp.mean(penalised * penalised, axis=1)
        root = jnp.sqrt(total) + eps
        norm = jnp.linalg.norm(penalised, axis=1)
        limit = count * jnp.maximum(coefficient * jnp.linalg.norm(rows, axis=1), low)
        clip = jnp.where(norm > limit, limit / jnp.where(norm == 0, 1, norm), 1)
        # With eps = 0: rows without a gradient so far, or one whose square underflows.
        rate = jnp.where(root == 0, 0, clip * lr / jnp.where(root == 0, 1, root))
        keep = 1 - rate * l2 - lr * decay
        new = keep[:, None] * rows - rate[:, None] * grads
        return new, (total, jnp.full_like(last, now), count)
