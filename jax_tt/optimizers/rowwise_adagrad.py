"""Adagrad with one accumulator per row."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt.optimizers._accumulated import Accumulated, scaled
from jax_tt.optimizers._base import Slots


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Accumulated):
    """``s += mean(g**2); w -= learning_rate * g / (sqrt(s) + eps)`` with one ``s`` per row.

    A row of a tensor-train core is its slice ``core[k][i]``, and the mean is taken over the slice.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        eps: added to the square root of the accumulator.
        initial_accumulator_value: initial value of ``s``.

    >>> import jax_tt
    >>> jax_tt.optimizers.RowWiseAdagrad(0.1).slots[0].rowwise
    True
    """

    native_kind: ClassVar[int] = 2
    rowwise: ClassVar[bool] = True

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        total = slots[0].astype(rows.dtype) + jnp.mean(grads * grads, axis=1)
        return rows - scaled(grads, total[:, None], hyper), (total,)
