"""The common part of Adam and its relatives."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_dtype
from jax_tt.optimizers._base import (
    SLOT_DTYPES,
    Optimizer,
    Scalar,
    Slot,
    at_step,
    check_choice,
    check_scalar,
    one_minus_power,
)

# Chosen, of 1, 3 and 10, by the recall on held-out train items of a table that was trained with 4 bits.
_MOST_RATES = 10.0


@dataclasses.dataclass(frozen=True)
class Moments(Optimizer):
    """Hyper-parameters of a rule with two moments."""

    learning_rate: Scalar
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8
    weight_decay: Scalar = 0.0
    moment_dtype: Any = dataclasses.field(default="float32", kw_only=True)
    static: ClassVar[frozenset[str]] = frozenset({"moment_dtype"})

    def __post_init__(self) -> None:
        check_scalar("learning_rate", self.learning_rate, 0.0)
        check_scalar("b1", self.b1, 0.0, 1.0)
        check_scalar("b2", self.b2, 0.0, 1.0)
        check_scalar("eps", self.eps, 0.0)
        check_scalar("weight_decay", self.weight_decay, 0.0)
        # A name: jit reuses programs for equal rules.
        dtype = as_dtype("moment_dtype", self.moment_dtype, jnp.dtype("float32")).name
        check_choice("moment_dtype", dtype, SLOT_DTYPES)
        object.__setattr__(self, "moment_dtype", dtype)

    def moment_slot(self, name: str) -> Slot:
        """A moment of every entry of a row."""
        return Slot(name, False, 0.0, dtype=self.moment_dtype)

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        t = jnp.asarray(step, jnp.float32) + 1
        given = (self.learning_rate, self.b1, self.b2, self.eps, self.weight_decay)
        scalars = [at_step(value, step) for value in given]
        corrections = [one_minus_power(base, t, step) for base in (self.b1, self.b2)]
        return jnp.stack([*scalars, *corrections])


def moment(decay: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """A moment after one more value, in the type of the value."""
    return decay * old.astype(new.dtype) + (1 - decay) * new


def adaptive(
    mu: jax.Array,
    nu: jax.Array,
    corrections: Sequence[jax.Array],
    eps: jax.Array,
    lr: jax.Array | float = 1.0,
) -> jax.Array:
    """Adam's step."""
    root = jnp.sqrt(nu / corrections[1]) + eps
    # With eps = 0: entries without a gradient so far, or one whose square underflows.
    return jnp.where(root == 0, 0, lr * (mu / corrections[0]) / root)


def compensating(
    mu: jax.Array,
    nu: jax.Array,
    corrections: Sequence[jax.Array],
    errors: jax.Array,
    spacing: jax.Array,
    hyper: jax.Array,
) -> jax.Array:
    """The first moment with which the next steps of Adam make up for ``errors``, see `Optimizer.compensated`.

    What is added to the moment moves the row in later steps, in total by the error if the learning rate is constant.
    Where the rate is small, only a share of the error is made up for, such that it adds at most ten times the rate to a
    step: the rate may rise before the row is used again. The share does not depend on how a number was rounded, so that
    the mean stays exact.
    """
    lr, b1, _, eps = hyper[:4].astype(errors.dtype)
    rates = errors * jnp.minimum((1 - b1) / (b1 * lr), _MOST_RATES / spacing[:, None])
    unit = corrections[0] * (jnp.sqrt(nu / corrections[1]) + eps)
    # Where the second moment overflows, Adam does not move the row.
    return mu - jnp.where(jnp.isfinite(unit), rates * unit, 0)


def norm_ratio(rows: jax.Array, steps: jax.Array) -> jax.Array:
    """``|rows| / |steps|`` of each row, ``[R, 1]``; 1 where either norm is zero."""
    above = jnp.linalg.norm(rows, axis=1, keepdims=True)
    below = jnp.linalg.norm(steps, axis=1, keepdims=True)
    none = (above == 0) | (below == 0)
    return jnp.where(none, 1, above / jnp.where(none, 1, below))
