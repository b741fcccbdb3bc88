"""The common part of rules that change a whole table now and then."""

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import Optimizer
from jax_tt.optimizers._counts import MOST_STEPS


def every(period: int, step: jax.Array) -> jax.Array:
    """Whether the number of the next step, counted from 1, is a multiple of ``period``, after ``step`` steps."""
    # Where steps are no longer counted, nothing is due any more, rather than in every step.
    return (jnp.mod(step + 1, period) == 0) & (step < MOST_STEPS)


def refuse_slices(rule: Optimizer, width: int | None) -> None:
    """Raises for a tensor train."""
    if width is None:
        raise TypeError(
            f"optimizer: got {type(rule).__name__}; it averages rows, and is for dense tables. Averages of the cores "
            "of a tensor train are not those of its rows: use RowWiseAdagrad, and average the model outside, e.g. with "
            "optax.incremental_update."
        )
