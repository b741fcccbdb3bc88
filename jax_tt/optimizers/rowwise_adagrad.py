"""Adagrad with one accumulator per row."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_tt.optimizers._accumulated import Accumulated, scaled
from jax_tt.optimizers._base import Scalar, Slots, at_step, check_decay, check_scalar

WeightDecayMode = Literal["none", "l2", "decoupled"]


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Accumulated):
    """``s += mean(g**2); w -= learning_rate * g / (sqrt(s) + eps)`` with one ``s`` per row.

    A row of a tensor-train core is its slice ``core[k][i]``, and the mean and the norm are taken over the slice.

    With ``weight_decay_mode="l2"``, ``g`` is replaced by ``g + weight_decay * w``. With ``"decoupled"``, the row is
    multiplied by ``1 - learning_rate * weight_decay`` in the step, and ``s`` does not depend on the decay. Only rows of
    the batch decay. It is ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM's table-batched embedding with the modes ``NONE``,
    ``L2`` and ``DECOUPLE``.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        eps: added to the square root of the accumulator.
        initial_accumulator_value: initial value of ``s``.
        weight_decay: factor of the decay. Needs a ``weight_decay_mode``.
        weight_decay_mode: ``"none"``, ``"l2"`` or ``"decoupled"``.
        max_norm: rows whose norm exceeds it after a step are scaled to it; None for no limit.

    >>> import jax_tt
    >>> jax_tt.optimizers.RowWiseAdagrad(0.1).slots[0].rowwise
    True
    >>> rule = jax_tt.optimizers.RowWiseAdagrad(0.1, weight_decay=0.01, weight_decay_mode="l2", max_norm=1.0)
    """

    weight_decay: Scalar = 0.0
    weight_decay_mode: WeightDecayMode = "none"
    max_norm: Scalar | None = None
    native_kind: ClassVar[int] = 2
    regularized_kind: ClassVar[int] = 8
    rowwise: ClassVar[bool] = True
    static: ClassVar[frozenset[str]] = frozenset({"weight_decay_mode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self.weight_decay, self.weight_decay_mode)
        if self.max_norm is not None:
            check_scalar("max_norm", self.max_norm, 0.0)

    @property
    def kind(self) -> int:
        regularized = self.weight_decay_mode != "none" or self.max_norm is not None
        return self.regularized_kind if regularized else self.native_kind

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        own = super().hyperparameters(step)
        if self.kind == self.native_kind:
            return own
        decay, off = at_step(self.weight_decay, step), jnp.zeros((), jnp.float32)
        penalties = (decay, off) if self.weight_decay_mode == "l2" else (off, decay)
        limit = at_step(jnp.inf if self.max_norm is None else self.max_norm, step)
        return jnp.concatenate([own, jnp.stack([*penalties, limit])])

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        if self.kind == self.native_kind:
            total = slots[0].astype(rows.dtype) + jnp.mean(grads * grads, axis=1)
            return rows - scaled(grads, total[:, None], hyper), (total,)
        lr, _, l2, decay, limit = hyper.astype(rows.dtype)
        grads = grads + l2 * rows
        total = slots[0].astype(rows.dtype) + jnp.mean(grads * grads, axis=1)
        new = (1 - lr * decay) * rows - scaled(grads, total[:, None], hyper[:2])
        norm = jnp.linalg.norm(new, axis=1, keepdims=True)
        return jnp.where(norm > limit, new * (limit / norm), new), (total,)
