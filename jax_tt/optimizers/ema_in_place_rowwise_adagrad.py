"""Row-wise Adagrad on rows whose second half follows the first."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_positive
from jax_tt.optimizers._base import Slots, check_plain
from jax_tt.optimizers._periods import every, refuse_slices
from jax_tt.optimizers.rowwise_adagrad import RowWiseAdagrad


@dataclasses.dataclass(frozen=True)
class EMAInPlaceRowWiseAdagrad(RowWiseAdagrad):
    """`RowWiseAdagrad` on rows of two halves, the second of which is a moving average of the first.

    Let ``t`` count the steps from 1. Before every step from ``t = start`` on whose ``t`` is a multiple of
    ``average_every``, ``w[D / 2:] += rate * (w[:D / 2] - w[D / 2:])`` for all rows. This is done at the end of the
    preceding step, and so not before the first step. It is ``EMAINPLACE_ROWWISE_ADAGRAD`` of FBGEMM's table-batched
    embedding. A lookup returns both halves; the second one is the target of a loss that does not train it.

    Such a step reads and writes the whole table, for which every step of the program reserves memory of half its size.
    It is for dense tables with an even number of columns.

    Args:
        learning_rate, eps, initial_accumulator_value, weight_decay, weight_decay_mode, max_norm: as in
            `RowWiseAdagrad`.
        average_every: steps between averages.
        start: the first ``t`` with an average.
        rate: share of the first half in the new second half, from 0 to 1.

    >>> import jax_tt
    >>> rule = jax_tt.optimizers.EMAInPlaceRowWiseAdagrad(0.1, average_every=10, rate=0.5)
    >>> [slot.name for slot in rule.slots]
    ['sum']
    """

    average_every: int = 10
    start: int = 0
    rate: float = 0.6
    static: ClassVar[frozenset[str]] = RowWiseAdagrad.static | {"average_every", "start", "rate"}

    def __post_init__(self) -> None:
        super().__post_init__()
        as_positive("average_every", self.average_every)
        check_plain("start", self.start, 0)
        check_plain("rate", self.rate, 0, 1)

    def changes_all(self, step: jax.Array) -> jax.Array:
        return every(self.average_every, step) & (step + 1 >= self.start)

    def change_all(self, rows: jax.Array, slots: Slots, step: jax.Array) -> tuple[jax.Array, Slots]:
        del step
        fast, slow = jnp.split(rows, 2, axis=1)
        return rows.at[:, rows.shape[1] // 2 :].set(slow + self.rate * (fast - slow)), slots

    def check_width(self, width: int | None) -> None:
        refuse_slices(self, width)
        if width is not None and width % 2:
            raise ValueError(
                f"features: got {width}; EMAInPlaceRowWiseAdagrad needs an even number of columns, the second half of "
                "which is the average of the first."
            )
