"""Row-wise Adagrad that knows how often or when a row was used."""

import dataclasses
import math
from typing import ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import one_of
from jax_tt.optimizers._base import (
    Hyper,
    Scalar,
    Slot,
    Slots,
    at_step,
    check_numbers,
    interval,
    one_more,
    this_step,
)
from jax_tt.optimizers.adagrad import (
    Accumulated,
    WeightDecayMode,
    check_decay,
    penalties,
    scaled,
)

_Rate = Literal["none", "tail_id_increase", "tail_id_decrease", "counter_sgd"]
_Decay = Literal[WeightDecayMode, "adagradw"]
_RATES, _DECAYS = get_args(_Rate), get_args(_Decay)


@dataclasses.dataclass(frozen=True)
class Counted(Accumulated):
    """What rules that count the uses of a row share."""

    halflife: Scalar = -1.0
    weight_decay: Scalar = 0.0
    rowwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "halflife", within="(-inf, inf)")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*super().slots, Slot("last_step", True, 0.0), Slot("count", True, 0.0))

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        return {**super().hyperparameters(step), "step": this_step(step)}


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
        learning_rate, eps, initial_accumulator_value: as in `RowWiseAdagrad`.
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

    weight_decay_mode: _Decay = "none"
    learning_rate_mode: _Rate = "none"
    adjustment_iter: Scalar = -1.0
    adjustment_ub: Scalar = 1.0
    tail_id_threshold: Scalar = 0.0
    tail_id_threshold_is_ratio: bool = False
    max_counter: Scalar | None = None
    native_kind: ClassVar[str] = "CounterRowWiseAdagrad"
    static: ClassVar[frozenset[str]] = frozenset(
        {"weight_decay_mode", "learning_rate_mode", "tail_id_threshold_is_ratio"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self, _DECAYS)
        one_of("learning_rate_mode", self.learning_rate_mode, _RATES)
        check_numbers(self, "adjustment_iter", within="(-inf, inf)")
        check_numbers(self, "adjustment_ub", "tail_id_threshold")
        if self.max_counter is not None:
            check_numbers(self, "max_counter")
        elif self.learning_rate_mode.startswith("tail_id") or self.tail_id_threshold_is_ratio:
            raise ValueError(
                "max_counter: got None; the learning-rate modes 'tail_id_...' and a threshold that is a ratio compare "
                "the counters of rows with it. Give the largest counter of the table plus 1, e.g. as an nnx.Variable "
                "that the training loop sets."
            )

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        values = {"max_counter": at_step(1.0, step), **super().hyperparameters(step)}
        tail = values["tail_id_threshold"]
        if self.tail_id_threshold_is_ratio:
            tail = jnp.floor(tail * values["max_counter"])
        return {
            **values,
            "tail": tail,
            "rate_mode": at_step(_RATES.index(self.learning_rate_mode), step),
            "decay_mode": at_step(_DECAYS.index(self.weight_decay_mode), step),
        }

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        lr, eps, decay, halflife = (
            hyper[name] for name in ("learning_rate", "eps", "weight_decay", "halflife")
        )
        now, highest, first, bound = (
            hyper[name] for name in ("step", "max_counter", "adjustment_iter", "adjustment_ub")
        )
        total, last, count = slots
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
        rate = jnp.where(count > hyper["tail"], rate, plain)
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
        learning_rate, eps, initial_accumulator_value: as in `RowWiseAdagrad`.
        halflife: of a use in the counter, in steps; negative to count all, 0 to count only the current one.
        weight_decay: factor of the decay.
        weight_decay_mode: ``"none"``, ``"l2"`` or ``"decoupled"``.
        weight_norm_coefficient: limit of the norm of a gradient per norm of the row.
        lower_bound: limit where the row is nearly zero.

    >>> import jax_tt
    >>> [slot.name for slot in jax_tt.optimizers.CowClip(0.1).slots]
    ['sum', 'last_step', 'count']
    """

    weight_decay_mode: WeightDecayMode = "none"
    weight_norm_coefficient: Scalar = 1.0
    lower_bound: Scalar = 1e-5
    native_kind: ClassVar[str] = "CowClip"
    static: ClassVar[frozenset[str]] = frozenset({"weight_decay_mode"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay(self)
        check_numbers(self, "weight_norm_coefficient", "lower_bound")

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        values = super().hyperparameters(step)
        return values | penalties(self.weight_decay_mode, values["weight_decay"])

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        (total, last, count), now = slots, hyper["step"]
        lr, l2 = hyper["learning_rate"], hyper["l2"]
        count = count_use(count, hyper["halflife"], interval(last, now))
        penalised = grads + l2 * rows
        total = total + jnp.mean(penalised * penalised, axis=1)
        root = jnp.sqrt(total) + hyper["eps"]
        norm = jnp.linalg.norm(penalised, axis=1)
        of_weights = hyper["weight_norm_coefficient"] * jnp.linalg.norm(rows, axis=1)
        limit = count * jnp.maximum(of_weights, hyper["lower_bound"])
        clip = jnp.where(norm > limit, limit / jnp.where(norm == 0, 1, norm), 1)
        # With eps = 0: rows without a gradient so far, or one whose square underflows.
        rate = jnp.where(root == 0, 0, clip * lr / jnp.where(root == 0, 1, root))
        keep = 1 - rate * l2 - lr * hyper["decay"]
        new = keep[:, None] * rows - rate[:, None] * grads
        return new, (total, jnp.full_like(last, now), count)


@dataclasses.dataclass(frozen=True)
class GlobalDecayRowWiseAdagrad(Accumulated):
    """`RowWiseAdagrad` with decoupled weight decay of all rows in every step, applied when a row is used.

    With ``keep = 1 - learning_rate * weight_decay``, and ``n`` steps since the row was last used, its *late decay* is
    ``late = max(lower_bound, keep**(n - 1))``, and 1 at its first use. In training, lookups return ``late * w``. The
    step is ``s += mean(g**2); w = keep * late * w - learning_rate * g / (sqrt(s) + eps)``, where ``g`` is the gradient
    with respect to what the lookup returned. Up to the step before ``start``, counted from 1, ``late`` is 1, and no
    last use is recorded. It is ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM's table-batched embedding with
    ``WeightDecayMode.DECOUPLE_GLOBAL``.

    Lookups outside of training, those with ``Lookup(train=False)`` and of layers with ``deterministic=True``, return
    ``w`` as it is stored, as in FBGEMM. With a learning rate that changes, all missed steps have that of the current
    one. It is for dense tables.

    Args:
        learning_rate, eps, initial_accumulator_value: as in `RowWiseAdagrad`.
        weight_decay: factor of the decay.
        lower_bound: the smallest late decay, below 1.
        start: the first step with late decay, counted from 1.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> rule = jax_tt.optimizers.GlobalDecayRowWiseAdagrad(0.5, weight_decay=0.5)
    >>> table = jax_tt.dense_table(4, 1, embedding_init=jax.nn.initializers.ones, optimizer=rule)
    >>> state = table.init(jax.random.key(0))
    >>> def loss(state, ids):
    ...     return 0.0 * jax_tt.lookup_bags(table, state, ids)[0].sum()
    >>> for row in (3, 1, 1, 3):
    ...     state = jax.grad(loss)(state, jnp.array([[row]]))
    >>> [round(x, 4) for x in state["embedding"].ravel().tolist()]
    [1.0, 0.5625, 1.0, 0.3164]
    """

    weight_decay: Scalar = 0.0
    lower_bound: Scalar = 0.0
    start: Scalar = 0.0
    native_kind: ClassVar[str] = "GlobalDecayRowWiseAdagrad"
    rowwise: ClassVar[bool] = True
    not_for_trains: ClassVar[str] = (
        "The rows of a tensor train share slices of its cores, so that none of them decays alone: use RowWiseAdagrad "
        "with a weight_decay."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "weight_decay", "start")
        check_numbers(self, "lower_bound", within="[0, 1)")

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (*super().slots, Slot("last_step", True, 0.0))

    def hyperparameters(self, step: jax.Array) -> dict[str, jax.Array]:
        values = super().hyperparameters(step)
        keep = 1 - values["learning_rate"] * values["weight_decay"]
        return {**values, "keep": keep, "step": this_step(step)}

    def read_scale(self, slots: Slots, hyper: Hyper) -> jax.Array:
        (_, last), now = slots, hyper["step"]
        late = jnp.power(hyper["keep"], interval(last, now) - 1)
        return jnp.where(now < hyper["start"], 1, jnp.maximum(hyper["lower_bound"], late))

    def update_rows(
        self, rows: jax.Array, grads: jax.Array, slots: Slots, hyper: Hyper
    ) -> tuple[jax.Array, Slots]:
        (total, last), now = slots, hyper["step"]
        late = self.read_scale(slots, hyper)[:, None]
        total = total + jnp.mean(grads * grads, axis=1)
        new = hyper["keep"] * late * rows - scaled(grads, total[:, None], hyper)
        return new, (total, jnp.where(now < hyper["start"], last, now))


def count_use(count: jax.Array, halflife: jax.Array, since: jax.Array) -> jax.Array:
    """Uses of a row after one more: all of them, only this one (halflife 0), or with older ones counting less."""
    decay = jnp.exp(-since * math.log(2) / jnp.where(halflife > 0, halflife, 1))
    decayed = jnp.where(halflife > 0, 1 + decay * count, 1)
    return jnp.where(halflife < 0, one_more(count), decayed)
