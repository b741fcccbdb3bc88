"""Adagrad with one accumulator per entry or per row, and with momentum."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import one_of
from jax_tt.optimizers._base import (
    Hyper,
    Optimizer,
    Scalar,
    Slot,
    Slots,
    at_step,
    check_numbers,
    is_zero,
)

WeightDecayMode = Literal["none", "l2", "decoupled"]


@dataclasses.dataclass(frozen=True)
class Accumulated(Optimizer):
    """What rules that accumulate squares share."""

    learning_rate: Scalar
    eps: Scalar = 1e-10
    initial_accumulator_value: float = 0.0
    rowwise: ClassVar[bool]
    initial: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", "eps", "initial_accumulator_value")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", self.rowwise, self.initial_accumulator_value),)


def scaled(grads: jax.Array, total: jax.Array, hyper: Hyper) -> jax.Array:
    """The step ``learning_rate * grads / (sqrt(total) + eps)``."""
    root = jnp.sqrt(total) + hyper["eps"]
    # With eps = 0: gradients that are all 0, or whose squares underflow.
    return jnp.where(root == 0, 0, hyper["learning_rate"] * grads / root)


def check_decay(rule: Any, modes: Sequence[str] = get_args(WeightDecayMode)) -> None:
    """Checks ``weight_decay`` and ``weight_decay_mode``, which need each other."""
    check_numbers(rule, "weight_decay")
    mode = one_of("weight_decay_mode", rule.weight_decay_mode, modes)
    if mode == "none" and not is_zero(rule.weight_decay):
        raise ValueError(
            "weight_decay: it has no effect with weight_decay_mode='none'; choose "
            f"{' or '.join(map(repr, modes[1:]))}."
        )


def penalties(mode: str, decay: jax.Array) -> dict[str, jax.Array]:
    """A weight decay as that of the gradient and that of the row, at least one of which is 0."""
    zero = jnp.zeros_like(decay)
    return {
        "l2": decay if mode == "l2" else zero,
        "decay": decay if mode == "decoupled" else zero,
    }


@dataclasses.dataclass(frozen=True)
class Adagrad(Accumulated):
    """``s += g**2; w -= learning_rate * g / (sqrt(s) + eps)``.

    ``optax.adagrad`` divides by ``sqrt(s + eps)`` instead, and initialises its accumulator with 0.1. With ``eps`` near
    0 and equal initial values both give the same result.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.
        eps: added to the square root of the accumulator.
        initial_accumulator_value: initial value of ``s``.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.Adagrad(0.1).slots]
    ['sum']
    """

    native_kind: ClassVar[str] = "Adagrad"
    elementwise: ClassVar[bool] = True
    rowwise: ClassVar[bool] = False

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        total = slots[0] + grads * grads
        return rows - scaled(grads, total, hyper), (total,)


@dataclasses.dataclass(frozen=True)
class RowWiseAdagrad(Accumulated):
    """``s += mean(g**2); w -= learning_rate * g / (sqrt(s) + eps)`` with one ``s`` per row.

    A row of a tensor-train core is its slice ``core[k][i]``, and the mean and the norm are taken over the slice.

    With ``weight_decay_mode="l2"``, ``g`` is replaced by ``g + weight_decay * w``. With ``"decoupled"``, the row is
    multiplied by ``1 - learning_rate * weight_decay`` in the step, and ``s`` does not depend on the decay. Only rows of
    the batch decay. It is ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM's table-batched embedding with the modes ``NONE``,
    ``L2`` and ``DECOUPLE``.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.
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
    native_kind: ClassVar[str] = "RowWiseAdagrad"
    rowwise: ClassVar[bool] = True
    static: ClassVar[frozenset[str]] = frozenset({"weight_decay_mode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self)
        if self.max_norm is not None:
            check_numbers(self, "max_norm")

    @property
    def kind(self) -> str:
        regularized = self.weight_decay_mode != "none" or self.max_norm is not None
        return "RegularizedRowWiseAdagrad" if regularized else self.native_kind

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        values = {"max_norm": at_step(jnp.inf, step), **super().hyperparameters(step)}
        return values | penalties(self.weight_decay_mode, values["weight_decay"])

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        regularized = self.kind != self.native_kind
        if regularized:
            grads = grads + hyper["l2"] * rows
        total = slots[0] + jnp.mean(grads * grads, axis=1)
        step = scaled(grads, total[:, None], hyper)
        if not regularized:
            return rows - step, (total,)
        new = (1 - hyper["learning_rate"] * hyper["decay"]) * rows - step
        norm, limit = jnp.linalg.norm(new, axis=1, keepdims=True), hyper["max_norm"]
        return jnp.where(norm > limit, new * (limit / norm), new), (total,)


@dataclasses.dataclass(frozen=True)
class AdagradMomentum(Optimizer):
    """``s += g**2; p = (s + eps)**(-1 / exponent); m = momentum * m + p * g; w -= learning_rate * m``.

    With ``b2`` below 1 the squares are averaged: ``s = b2 * s + (1 - b2) * g**2``. With ``nesterov`` the step is
    ``w -= learning_rate * (momentum * m + p * g)``. The formulas are those of ``AdagradMomentumOptimizerSpec`` of
    jax-tpu-embedding; optax has no counterpart. Moments change only when their row is used.

    Args:
        learning_rate: float, ``nnx.Variable`` or schedule of the step.
        momentum: decay of ``m``.
        b2: decay of ``s``; 1 for a sum.
        eps: added to ``s``.
        exponent: 2 for the square root of Adagrad.
        nesterov: whether the step looks ahead.
        initial_accumulator_value: initial value of ``s``.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.AdagradMomentum(0.1).slots]
    ['sum', 'momentum']
    """

    learning_rate: Scalar
    momentum: Scalar = 0.9
    b2: Scalar = 1.0
    eps: Scalar = 1e-10
    exponent: Scalar = 2.0
    nesterov: bool = False
    initial_accumulator_value: float = 0.1
    native_kind: ClassVar[str] = "AdagradMomentum"
    initial: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})
    static: ClassVar[frozenset[str]] = frozenset({"nesterov"})

    def __post_init__(self) -> None:
        check_numbers(self, "learning_rate", "eps", "initial_accumulator_value")
        check_numbers(self, "momentum", within="[0, 1)")
        check_numbers(self, "b2", within="[0, 1]")
        check_numbers(self, "exponent", within="(0, inf)")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("sum", False, self.initial_accumulator_value), Slot("momentum", False, 0.0))

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        values = super().hyperparameters(step)
        b2 = values["b2"]
        return {
            **values,
            "gain": jnp.where(b2 == 1, 1, 1 - b2),
            "power": -1 / values["exponent"],
            "nesterov": at_step(self.nesterov, step),
        }

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        (total, mean), momentum, eps = slots, hyper["momentum"], hyper["eps"]
        total = hyper["b2"] * total + hyper["gain"] * grads * grads
        # With eps = 0: entries without a gradient so far, or one whose square underflows.
        none = total + eps == 0
        scale = jnp.where(none, 0, jnp.power(jnp.where(none, 1, total + eps), hyper["power"]))
        mean = momentum * mean + scale * grads
        step = momentum * mean + scale * grads if self.nesterov else mean
        return rows - hyper["learning_rate"] * step, (total, mean)
