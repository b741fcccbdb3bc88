"""Adam and LAMB on the rows of a batch."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_dtype, one_of
from jax_tt.optimizers._base import (
    SLOT_DTYPES,
    Hyper,
    Optimizer,
    Scalar,
    Slot,
    Slots,
    at_step,
    check_numbers,
    is_zero,
    one_more,
)

# Chosen, of 1, 3 and 10, by the recall on held-out train items of a table that was trained with 4 bits.
_MOST_RATES = 10.0


@dataclasses.dataclass(frozen=True)
class Moments(Optimizer):
    """What rules with two moments share; the first moment has a number for every entry of a row."""

    learning_rate: Scalar
    b1: Scalar = 0.9
    b2: Scalar = 0.999
    eps: Scalar = 1e-8
    weight_decay: Scalar = 0.0
    moment_dtype: Any = dataclasses.field(default="float32", kw_only=True)
    static: ClassVar[frozenset[str]] = frozenset({"moment_dtype"})
    rowwise: ClassVar[bool] = False  # whether there is one second moment per row
    by_norm: ClassVar[bool] = False  # whether the step is scaled to the norm of the row

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", "eps", "weight_decay")
        check_numbers(self, "b1", "b2", within="[0, 1)")
        # A name: jit reuses programs for equal rules.
        dtype = as_dtype("moment_dtype", self.moment_dtype, jnp.dtype("float32")).name
        object.__setattr__(self, "moment_dtype", one_of("moment_dtype", dtype, SLOT_DTYPES))

    @property
    def slots(self) -> tuple[Slot, ...]:
        mu, nu = (Slot(name, False, 0.0, dtype=self.moment_dtype) for name in ("mu", "nu"))
        return (mu, Slot("nu", True, 0.0) if self.rowwise else nu)

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        values, t = super().hyperparameters(step), at_step(step, step) + 1
        for k, base in enumerate((self.b1, self.b2), start=1):
            values[f"log_b{k}"] = log = log_of(base, step)
            # 1 - b**t, without the cancellation for b near 1.
            values[f"correction{k}"] = -jnp.expm1(t * log)
        return values

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        lr, squares = hyper["learning_rate"], grads * grads
        mu = moment(hyper["b1"], slots[0], grads)
        nu = moment(hyper["b2"], slots[1], jnp.mean(squares, axis=1) if self.rowwise else squares)
        per_row = nu[:, None] if self.rowwise else nu
        step = adaptive(mu, per_row, hyper) + hyper["weight_decay"] * rows
        rate = lr * norm_ratio(rows, step) if self.by_norm else lr
        return rows - rate * step, (mu, nu)

    def compensated(
        self, slots: Slots, errors: jax.Array, spacing: jax.Array, hyper: Hyper
    ) -> Slots:
        """With a first moment by which the next steps make up for ``errors``.

        What is added to the moment moves the row in later steps, in total by the error if the learning rate is
        constant. Where the rate is small, only a share of the error is made up for, such that it adds at most ten times
        the rate to a step: the rate may rise before the row is used again. The share does not depend on how a number
        was rounded, so that the mean stays exact.
        """
        if self.by_norm:
            return slots
        (mu, nu, *count), b1, hyper = slots, hyper["b1"], with_counts(hyper, slots)
        most = jnp.divide(1 - b1, b1 * hyper["learning_rate"])
        rates = errors * jnp.minimum(most, _MOST_RATES / spacing[:, None])
        per_row = nu[:, None] if self.rowwise else nu
        unit = hyper["correction1"] * (jnp.sqrt(per_row / hyper["correction2"]) + hyper["eps"])
        # Where the second moment overflows, Adam does not move the row.
        return mu - jnp.where(jnp.isfinite(unit), rates * unit, 0), nu, *count


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
        learning_rate: float, ``nnx.Variable`` or schedule of the step.
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
    native_kind: ClassVar[str] = "Adam"
    elementwise: ClassVar[bool] = True
    static: ClassVar[frozenset[str]] = Moments.static | {"rowwise_bias_correction"}

    @property
    def kind(self) -> str:
        if self.rowwise_bias_correction:
            return "RowWiseCorrectedAdam"
        return self.native_kind if is_zero(self.weight_decay) else "DecayedAdam"

    @property
    def slots(self) -> tuple[Slot, ...]:
        counts = (Slot("count", True, 0.0),) if self.rowwise_bias_correction else ()
        return (*super().slots, *counts)

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        lr, b2 = hyper["learning_rate"], hyper["b2"]
        mu = moment(hyper["b1"], slots[0], grads)
        nu = b2 * slots[1] + (1 - b2) * grads * grads
        new = (mu, nu, *map(one_more, slots[2:]))
        if self.kind == self.native_kind:
            return rows - adaptive(mu, nu, hyper, lr), new
        step = adaptive(mu, nu, with_counts(hyper, new))
        return rows - lr * (step + hyper["weight_decay"] * rows), new


@dataclasses.dataclass(frozen=True)
class PartialRowWiseAdam(Moments):
    """Adam whose second moment is one number per row: ``v = b2 v + (1 - b2) mean(g**2)``.

    ``m = b1 m + (1 - b1) g;``
    ``w -= learning_rate * ((m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * w)``, where ``t`` counts
    all steps of the table. The moments change only when their row is used. The state is about half of that of `Adam`.
    It is ``PARTIAL_ROWWISE_ADAM`` of FBGEMM's table-batched embedding; optax has no counterpart.

    Args:
        learning_rate, b1, b2, eps, weight_decay: as in `Adam`.
        moment_dtype: as in `Adam`, of the first moment; the second one is float32.

    >>> import jax_tt
    >>> [(slot.name, slot.rowwise) for slot in jax_tt.optimizers.PartialRowWiseAdam(1e-3).slots]
    [('mu', False), ('nu', True)]
    """

    native_kind: ClassVar[str] = "PartialRowWiseAdam"
    rowwise: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class LAMB(Moments):
    """Adam whose step has the norm of the row: ``w -= learning_rate * (norm(w) / norm(r)) * r``.

    ``r = (m / (1 - b1**t)) / (sqrt(v / (1 - b2**t)) + eps) + weight_decay * w`` with the moments of `Adam`, which
    change only when their row is used; ``t`` counts all steps of the table. The ratio is 1 if either norm is zero.
    ``optax.lamb`` has the same formula and takes the norms over a whole array instead of a row. It is ``LAMB`` of
    FBGEMM's table-batched embedding, which divides by zero there.

    A row of a tensor-train core is its slice ``core[k][i]``, which several rows of the table share.

    Args:
        learning_rate, b1, b2, eps, moment_dtype: as in `Adam`.
        weight_decay: part of the step before it is scaled; only rows of the batch decay.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.LAMB(1e-3, weight_decay=0.01).slots]
    ['mu', 'nu']
    """

    native_kind: ClassVar[str] = "Lamb"
    by_norm: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class PartialRowWiseLAMB(LAMB):
    """`LAMB` whose second moment is one number per row: ``v = b2 v + (1 - b2) mean(g**2)``.

    The rest is as in `LAMB`, and the state is about half of it. It is ``PARTIAL_ROWWISE_LAMB`` of FBGEMM's
    table-batched embedding; optax has no counterpart. Native operations compute the norm of the step from sums of
    squares, which underflow for first moments below about 1e-18; such rows do not move.

    Args:
        learning_rate, b1, b2, eps, weight_decay: as in `LAMB`.
        moment_dtype: as in `Adam`, of the first moment; the second one is float32.

    >>> import jax_tt
    >>> [(slot.name, slot.rowwise) for slot in jax_tt.optimizers.PartialRowWiseLAMB(1e-3).slots]
    [('mu', False), ('nu', True)]
    """

    native_kind: ClassVar[str] = "PartialRowWiseLamb"
    rowwise: ClassVar[bool] = True


def log_of(base: Scalar, step: jax.Array) -> jax.Array:
    """The logarithm of a hyper-parameter at ``step``, rounded once where it is a number."""
    if isinstance(base, int | float):
        return at_step(math.log(base) if base > 0 else -math.inf, step)
    return jnp.log(at_step(base, step))


def moment(decay: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """A moment after one more value."""
    return decay * old + (1 - decay) * new


def with_counts(hyper: Hyper, slots: Slots) -> Hyper:
    """Hyper-parameters with the corrections of each row, if a third slot counts its steps."""
    for count in slots[2:]:
        of_rows = {f"correction{k}": -jnp.expm1(count * hyper[f"log_b{k}"]) for k in (1, 2)}
        return {**hyper, **{name: correction[:, None] for name, correction in of_rows.items()}}
    return hyper


def adaptive(mu: jax.Array, nu: jax.Array, hyper: Hyper, lr: jax.Array | float = 1.0) -> jax.Array:
    """Adam's step."""
    root = jnp.sqrt(nu / hyper["correction2"]) + hyper["eps"]
    # With eps = 0: entries without a gradient so far, or one whose square underflows.
    return jnp.where(root == 0, 0, lr * (mu / hyper["correction1"]) / root)


def norm_ratio(rows: jax.Array, steps: jax.Array) -> jax.Array:
    """``|rows| / |steps|`` of each row, ``[R, 1]``; 1 where either norm is zero."""
    above = jnp.linalg.norm(rows, axis=1, keepdims=True)
    below = jnp.linalg.norm(steps, axis=1, keepdims=True)
    none = (above == 0) | (below == 0)
    return jnp.where(none, 1, above / jnp.where(none, 1, below))
