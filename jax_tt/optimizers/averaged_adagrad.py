"""Row-wise Adagrad on tables that are averaged over time."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_positive, expect
from jax_tt.optimizers._base import MOST_STEPS, Slot, Slots, check_numbers
from jax_tt.optimizers.adagrad import RowWiseAdagrad

_NOT_FOR_TRAINS = (
    "Averages of the cores of a tensor train are not those of its rows: use RowWiseAdagrad, and average the model "
    "outside, e.g. with optax.incremental_update."
)


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
    not_for_trains: ClassVar[str] = _NOT_FOR_TRAINS

    def __post_init__(self) -> None:
        super().__post_init__()
        as_positive("average_every", self.average_every)
        check_numbers(self, "start")
        check_numbers(self, "rate", within="[0, 1]")

    def changes_all(self, step: jax.Array) -> jax.Array:
        return every(self.average_every, step) & (step + 1 >= self.start)

    def change_all(self, rows: jax.Array, slots: Slots, step: jax.Array) -> tuple[jax.Array, Slots]:
        del step
        fast, slow = jnp.split(rows, 2, axis=1)
        return rows.at[:, rows.shape[1] // 2 :].set(slow + self.rate * (fast - slow)), slots

    def check_width(self, width: int | None) -> None:
        super().check_width(width)
        if width is not None and width % 2:
            raise ValueError(
                f"features: got {width}; EMAInPlaceRowWiseAdagrad needs an even number of columns, the second half of "
                "which is the average of the first."
            )


@dataclasses.dataclass(frozen=True)
class EnsembleRowWiseAdagrad(RowWiseAdagrad):
    """`RowWiseAdagrad` with an average of the table that replaces it now and then.

    Let ``t`` count the steps from 1. Before every step whose ``t`` is a multiple of ``average_every``, the average
    ``a``, one more slot, is ``decay * a + (1 - decay) * w`` for all rows; up to ``t = start``, and the first time,
    ``a = w``. Before every step whose ``t`` is a multiple of ``swap_every``, then ``w = a`` for all rows. This is done
    at the end of the preceding step, and so not before the first step.

    It is ``ENSEMBLE_ROWWISE_ADAGRAD`` of FBGEMM's table-batched embedding, where the first average is with zeros unless
    ``step_start`` prevents it, and ``StepMode.NONE`` sets the average to zero after each use. Both make the table
    smaller, and are left out.

    Such a step reads and writes the whole table; all others do not touch the average. It is for dense tables.

    Args:
        learning_rate, eps, initial_accumulator_value, weight_decay, weight_decay_mode, max_norm: as in
            `RowWiseAdagrad`.
        average_every, swap_every: steps between averages and between replacements, the latter at least as many.
        start: the last ``t`` at which the average is a copy of the table.
        decay: factor of the average, from 0 to 1.

    >>> import jax_tt
    >>> rule = jax_tt.optimizers.EnsembleRowWiseAdagrad(0.1, average_every=100, swap_every=1000)
    >>> [slot.name for slot in rule.slots]
    ['average', 'sum']
    """

    average_every: int = 10_000
    swap_every: int = 10_000
    start: int = 0
    decay: float = 0.6
    static: ClassVar[frozenset[str]] = RowWiseAdagrad.static | {
        "average_every",
        "swap_every",
        "start",
        "decay",
    }
    not_for_trains: ClassVar[str] = _NOT_FOR_TRAINS

    def __post_init__(self) -> None:
        super().__post_init__()
        as_positive("average_every", self.average_every)
        as_positive("swap_every", self.swap_every)
        check_numbers(self, "start")
        check_numbers(self, "decay", within="[0, 1]")
        expect(
            self.swap_every >= self.average_every,
            "swap_every",
            self.swap_every,
            f"at least average_every, {self.average_every}",
            "There is no average before.",
        )

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("average", False, 0.0, stepped=False), *super().slots)

    def changes_all(self, step: jax.Array) -> jax.Array:
        return every(self.average_every, step) | every(self.swap_every, step)

    def change_all(self, rows: jax.Array, slots: Slots, step: jax.Array) -> tuple[jax.Array, Slots]:
        average, total = slots
        # With a period of 1 the first average is at t = 2.
        copies = step + 1 <= max(self.start, self.average_every, 2)
        decay = jnp.where(copies, 0.0, self.decay).astype(rows.dtype)
        due = every(self.average_every, step)
        wide = average.astype(rows.dtype)
        new = jnp.where(due, wide + (1 - decay) * (rows - wide), wide)
        rows = jnp.where(every(self.swap_every, step), new, rows)
        return rows, (new.astype(average.dtype), total)


def every(period: int, step: jax.Array) -> jax.Array:
    """Whether the next step, after ``step`` steps, has a number counted from 1 that is a multiple of ``period``."""
    # Where steps are no longer counted, nothing is due any more, rather than in every step.
    return (jnp.mod(step + 1, period) == 0) & (step < MOST_STEPS)
