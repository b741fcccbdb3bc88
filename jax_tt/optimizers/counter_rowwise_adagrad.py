"""Row-wise Adagrad that counts how often every row is used."""

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jax_tt.optimizers._base import (
    DECAYS,
    Scalar,
    Slots,
    at_step,
    check_choice,
    check_decay,
    check_scalar,
)
from jax_tt.optimizers._counted import Counted
from jax_tt.optimizers._counts import count_use, interval, this_step

_RATES = ("none", "tail_id_increase", "tail_id_decrease", "counter_sgd")
_DECAYS = (*DECAYS, "adagradw")


@dataclasses.dataclass(frozen=True)
class CounterRowWiseAdagrad(Counted):
    """Row-wise Adagrad whose learning rate and weight decay depend on how often and when a row was used.

    It is ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM's table-batched embedding with ``WeightDecayMode.COUNTER``. The slots of a
    row are the sum ``s``, the step of its last use and a counter ``c`` of its uses. In a step, with ``n`` steps since
    the last use (1 at the first), ``c`` becomes ``c + 1`` for a negative ``halflife``, 1 for 0, and
    ``1 + 2**(-n / halflife) * c`` otherwise. Then ``s += mean(g**2)``, ``a = learning_rate / (sqrt(s) + eps)`` and
    ``w = keep * w - rate * g``, where by default ``rate = a`` and ``keep = 1``.

    Where ``c`` exceeds ``tail_id_threshold``, ``learning_rate_mode`` changes ``rate``:

    - ``"tail_id_increase"``: ``a * clip((max_counter / (c + 1))**adjustment_ub, 1, 10)``;
    - ``"tail_id_decrease"``: ``a * clip(((c + 1) / max_counter)**adjustment_ub, 0.1, 1)``;
    - ``"counter_sgd"``: ``learning_rate / (sqrt(adjustment_ub * c) + eps)``.

    ``weight_decay_mode`` changes ``keep``, with ``f = halflife / c`` for a positive ``halflife`` and 1 otherwise:

    - ``"l2"``: ``1 - f * weight_decay * a``, and ``s`` takes ``mean((g + weight_decay * w)**2)``;
    - ``"decoupled"``: ``1 - f * weight_decay * learning_rate``;
    - ``"adagradw"``: ``e = 1 - weight_decay * learning_rate`` to the power ``min(n, t - adjustment_iter)``, where ``t``
      counts the steps from 1, and ``rate`` is multiplied by ``e`` to that power less 1. With ``halflife=-1`` it is
      ``a * sqrt(c)`` before that, and with ``halflife=-2``
      ``min(learning_rate * c, adjustment_ub) / (sqrt(s) + eps)``.

    Up to the step ``adjustment_iter``, both modes are off. FBGEMM has ``f = halflife / c`` for any ``halflife``, so
    that rows grow if it is negative, and finds ``max_counter`` in the table now and then. Here it is a
    hyper-parameter, such as ``jnp.max(state["slot_count_0"]) + 1`` that the training loop computes every thousand
    steps. Counters stop at 16,777,216, and so does the number of steps, after which ``n`` is 1.

    A slice of a tensor-train core is used by many rows of the table: its counter says little about any of them.

    Args:
        learning_rate: float, scalar array, ``nnx.Variable`` or schedule of the step.
        eps: added to the square root of the sum.
        initial_accumulator_value: initial value of ``s``.
        halflife: of a use in the counter, in steps; see above for numbers that are not positive.
        weight_decay: factor of the decay.
        weight_decay_mode: ``"none"``, ``"l2"``, ``"decoupled"`` or ``"adagradw"``.
        learning_rate_mode: ``"none"``, ``"tail_id_increase"``, ``"tail_id_decrease"`` or ``"counter_sgd"``.
        adjustment_iter: the last step without changes by the two modes.
        adjustment_ub: exponent or bound of the changes.
        tail_id_threshold: counter above which the learning rate changes.
        tail_id_threshold_is_ratio: whether the threshold is a part of ``max_counter``, rounded down.
        max_counter: the largest counter of the table, plus 1. The modes ``"tail_id_..."`` need it, and so does a
            threshold that is a ratio.

    >>> import jax_tt
    >>> rule = jax_tt.optimizers.CounterRowWiseAdagrad(0.1, learning_rate_mode="counter_sgd")
    >>> [slot.name for slot in rule.slots]
    ['sum', 'last_step', 'count']
    """

    weight_decay_mode: Literal["none", "l2", "decoupled", "adagradw"] = "none"
    learning_rate_mode: Literal["none", "tail_id_increase", "tail_id_decrease", "counter_sgd"] = (
        "none"
    )
    adjustment_iter: Scalar = -1.0
    adjustment_ub: Scalar = 1.0
    tail_id_threshold: Scalar = 0.0
    tail_id_threshold_is_ratio: bool = False
    max_counter: Scalar | None = None
    native_kind: ClassVar[int] = 14
    static: ClassVar[frozenset[str]] = frozenset(
        {"weight_decay_mode", "learning_rate_mode", "tail_id_threshold_is_ratio"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self.weight_decay, self.weight_decay_mode, _DECAYS)
        check_choice("learning_rate_mode", self.learning_rate_mode, _RATES)
        check_scalar("adjustment_iter", self.adjustment_iter, -math.inf)
        for name in ("adjustment_ub", "tail_id_threshold"):
            check_scalar(name, getattr(self, name), 0.0)
        if self.max_counter is not None:
            check_scalar("max_counter", self.max_counter, 0.0)
        elif self.learning_rate_mode.startswith("tail_id") or self.tail_id_threshold_is_ratio:
            raise ValueError(
                "max_counter: got None; the learning-rate modes 'tail_id_...' and a threshold that is a ratio compare "
                "the counters of rows with it. Give the largest counter of the table plus 1, e.g. as an nnx.Variable "
                "that the training loop sets."
            )

    def hyperparameters(self, step: jax.Array) -> jax.Array:
        highest = at_step(1.0 if self.max_counter is None else self.max_counter, step)
        tail = at_step(self.tail_id_threshold, step)
        adjustments = [at_step(v, step) for v in (self.adjustment_iter, self.adjustment_ub)]
        if self.tail_id_threshold_is_ratio:
            tail = jnp.floor(tail * highest)
        rate, decay = (
            jnp.float32(names.index(name))
            for names, name in (
                (_RATES, self.learning_rate_mode),
                (_DECAYS, self.weight_decay_mode),
            )
        )
        given = (self.learning_rate, self.eps, self.weight_decay, self.halflife)
        scalars = [at_step(value, step) for value in given]
        return jnp.stack([*scalars, this_step(step), highest, *adjustments, tail, rate, decay])

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: jax.Array
    ) -> tuple[jax.Array, Slots]:
        lr, eps, decay, halflife, now, highest, first, bound, tail, *_ = hyper.astype(rows.dtype)
        total, last, count = (slot.astype(rows.dtype) for slot in slots)
        since = interval(last, now)
        count = count_use(count, halflife, since)
        penalised = grads + decay * rows if self.weight_decay_mode == "l2" else grads
        total = total + jnp.mean(penalised * penalised, axis=1)
        root = jnp.sqrt(total) + eps
        # With eps = 0: rows without a gradient so far, or one whose square underflows.
        inverse = jnp.where(root == 0, 0, 1 / jnp.where(root == 0, 1, root))
        plain = lr * inverse
        rate = plain
        if self.learning_rate_mode == "tail_id_increase":
            rate = plain * jnp.clip(jnp.power(highest / (count + 1), bound), 1, 10)
        elif self.learning_rate_mode == "tail_id_decrease":
            rate = plain * jnp.clip(jnp.power((count + 1) / highest, bound), 0.1, 1)
        elif self.learning_rate_mode == "counter_sgd":
            rate = lr / (jnp.sqrt(bound * count) + eps)
        rate = jnp.where(count > tail, rate, plain)
        frequency = jnp.where(halflife > 0, halflife / count, 1)
        keep = jnp.ones_like(plain)
        if self.weight_decay_mode == "l2":
            keep = 1 - frequency * decay * plain
        elif self.weight_decay_mode == "decoupled":
            keep = 1 - frequency * decay * lr
        elif self.weight_decay_mode == "adagradw":
            lazy = jnp.power(1 - decay * lr, jnp.minimum(since, now - first) - 1)
            of_count = jnp.where(
                halflife == -1, lr * jnp.sqrt(count), jnp.minimum(lr * count, bound)
            )
            counted = (halflife == -1) | (halflife == -2)
            rate = lazy * jnp.where(counted, of_count * inverse, rate)
            keep = lazy * (1 - decay * lr)
        adjusts = (first <= 0) | (now > first)
        rate, keep = jnp.where(adjusts, rate, plain), jnp.where(adjusts, keep, 1)
        new = keep[:, None] * rows - rate[:, None] * grads
        return new, (total, jnp.full_like(last, now), count)
