"""The fused rules in numpy float64, one row at a time, written from the formulas of the systems that they come from.

A model is a function of the row ``w``, the gradient ``g``, the slots of the row as a list, and the step ``t``, counted
from 1. It returns the new row and the new slots.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_tt import optimizers

Row = np.ndarray
State = list[Any]
Model = Callable[[Row, Row, State, int], tuple[Row, State]]


def norm(x: Row) -> float:
    return float(np.sqrt(np.sum(x * x)))


def ratio(above: float, below: float) -> float:
    return 1.0 if above == 0 or below == 0 else above / below


def adam_step(m: Any, v: Any, b1: float, b2: float, eps: float, t: int) -> Any:
    root = np.sqrt(v / (1 - b2**t)) + eps
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(root == 0, 0.0, m / (1 - b1**t) / root)


def inverse_root(total: Any, eps: float) -> Any:
    root = np.sqrt(total) + eps
    with np.errstate(divide="ignore"):
        return np.where(root == 0, 0.0, 1 / root)


def moments(rule: Any, rowwise: bool = False, trusted: bool = False) -> Model:
    """Adam, with one second moment for a row if ``rowwise``, and with steps as long as the row is if ``trusted``."""

    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        m = rule.b1 * s[0] + (1 - rule.b1) * g
        v = rule.b2 * s[1] + (1 - rule.b2) * (np.mean(g * g) if rowwise else g * g)
        count = [s[2] + 1] if getattr(rule, "rowwise_bias_correction", False) else []
        k = count[0] if count else t
        r = adam_step(m, v, rule.b1, rule.b2, rule.eps, k) + rule.weight_decay * w
        size = ratio(norm(w), norm(r)) if trusted else 1.0
        return w - rule.learning_rate * size * r, [m, v, *count]

    return step


def lars_sgd(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        trust = ratio(rule.eta * norm(w), norm(g) + rule.weight_decay * norm(w))
        m = rule.momentum * s[0] + rule.learning_rate * trust * (g + rule.weight_decay * w)
        return w - m, [m]

    return step


def sgd(rule: Any) -> Model:
    return lambda w, g, s, t: (w - rule.learning_rate * g, [])


def adagrad(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        total = s[0] + g * g
        return w - rule.learning_rate * inverse_root(total, rule.eps) * g, [total]

    return step


def rowwise_adagrad(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        l2 = rule.weight_decay_mode == "l2"
        statistic = g + rule.weight_decay * w if l2 else g
        total = s[0] + np.mean(statistic**2)
        m = rule.learning_rate * inverse_root(total, rule.eps)
        keep = 1 - (m if l2 else rule.learning_rate) * rule.weight_decay
        new = keep * w - m * g
        if rule.max_norm is not None and norm(new) > rule.max_norm:
            new = new * rule.max_norm / norm(new)
        return new, [total]

    return step


def rowwise_rmsprop(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        v = rule.decay * s[0] + (1 - rule.decay) * np.mean(g * g)
        waited = 1 if s[1] == 0 else t - s[1]
        lam = min(max(rule.learning_rate * rule.ar_alpha * waited, 0), 1)
        keep = max(rule.min_shrinkage, 1 - lam)
        return keep * w - rule.learning_rate * inverse_root(v, rule.eps) * g, [v, t]

    return step


def ftrl(rule: Any) -> Model:
    lr, k = rule.learning_rate, -rule.learning_rate_power
    l1, l2 = rule.l1_regularization_strength, rule.l2_regularization_strength

    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        total = s[0] + g * g
        if rule.multiply_linear_by_learning_rate:
            linear = s[1] + lr * g - (total**k - s[0] ** k) * w
            clipped = np.clip(linear, -lr * l1, lr * l1)
            return (clipped - linear) / (total**k + rule.beta + 2 * lr * l2), [total, linear]
        linear = s[1] + g - (total**k - s[0] ** k) / lr * w
        clipped = np.clip(linear, -l1, l1)
        return (clipped - linear) / ((total**k + rule.beta) / lr + 2 * l2), [total, linear]

    return step


def adagrad_momentum(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        total = s[0] + g * g if rule.b2 == 1 else rule.b2 * s[0] + (1 - rule.b2) * g * g
        p = (total + rule.eps) ** (-1 / rule.exponent)
        m = rule.momentum * s[1] + p * g
        update = rule.momentum * m + p * g if rule.nesterov else m
        return w - rule.learning_rate * update, [total, m]

    return step


def used(count: float, halflife: float, waited: float) -> float:
    if halflife > 0:
        return 1 + float(np.exp(-waited * np.log(2) / halflife)) * count
    return 1.0 if halflife == 0 else count + 1


def counter_rowwise_adagrad(rule: Any) -> Model:
    lr, wd, ub, h = rule.learning_rate, rule.weight_decay, rule.adjustment_ub, rule.halflife
    tail = rule.tail_id_threshold
    if rule.tail_id_threshold_is_ratio:
        tail = np.floor(tail * rule.max_counter)

    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        waited = 1 if s[1] == 0 else t - s[1]
        c = used(s[2], h, waited)
        freq = h / c if h > 0 else 1.0
        statistic = g + wd * w if rule.weight_decay_mode == "l2" else g
        total = s[0] + np.mean(statistic**2)
        m0 = lr * inverse_root(total, rule.eps)
        m, e = m0, 1.0
        if rule.adjustment_iter <= 0 or t > rule.adjustment_iter:
            if c > tail and rule.learning_rate_mode == "tail_id_increase":
                m = m0 * min(max((rule.max_counter / (c + 1)) ** ub, 1), 10)
            elif c > tail and rule.learning_rate_mode == "tail_id_decrease":
                m = m0 * min(max(((c + 1) / rule.max_counter) ** ub, 0.1), 1)
            elif c > tail and rule.learning_rate_mode == "counter_sgd":
                m = lr / (np.sqrt(ub * c) + rule.eps)
            if rule.weight_decay_mode == "adagradw":
                if h == -1:
                    m = m0 * np.sqrt(c)
                elif h == -2:
                    m = min(lr * c, ub) * inverse_root(total, rule.eps)
                lazy = (1 - wd * lr) ** (min(waited, t - rule.adjustment_iter) - 1)
                m, e = m * lazy, (1 - wd * lr) * lazy
            elif rule.weight_decay_mode == "decoupled":
                e = 1 - freq * wd * lr
            elif rule.weight_decay_mode == "l2":
                e = 1 - freq * wd * m0
        return e * w - m * g, [total, t, c]

    return step


def cow_clip(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        wd, l2 = rule.weight_decay, rule.weight_decay_mode == "l2"
        c = used(s[2], rule.halflife, 1 if s[1] == 0 else t - s[1])
        statistic = g + wd * w if l2 else g
        total = s[0] + np.mean(statistic**2)
        clip = c * max(rule.weight_norm_coefficient * norm(w), rule.lower_bound)
        below = norm(statistic)
        m = min(1.0, clip / below if below else 1.0)
        m = m * rule.learning_rate * inverse_root(total, rule.eps)
        e = {"none": 1.0, "l2": 1 - wd * m, "decoupled": 1 - wd * rule.learning_rate}
        return e[rule.weight_decay_mode] * w - m * g, [total, t, c]

    return step


MODELS: dict[type, Callable[[Any], Model]] = {
    optimizers.SGD: sgd,
    optimizers.Adagrad: adagrad,
    optimizers.PartialRowWiseAdam: functools.partial(moments, rowwise=True),
    optimizers.LAMB: functools.partial(moments, trusted=True),
    optimizers.PartialRowWiseLAMB: functools.partial(moments, rowwise=True, trusted=True),
    optimizers.LARSSGD: lars_sgd,
    optimizers.RowWiseAdagrad: rowwise_adagrad,
    optimizers.Adam: moments,
    optimizers.RowWiseRMSProp: rowwise_rmsprop,
    optimizers.FTRL: ftrl,
    optimizers.AdagradMomentum: adagrad_momentum,
    optimizers.CounterRowWiseAdagrad: counter_rowwise_adagrad,
    optimizers.CowClip: cow_clip,
}
# A name for each option of a rule; an eps that is large enough to show where it is added.
OPTIONS: dict[str, optimizers.Optimizer] = {
    "sgd": optimizers.SGD(0.05),
    "adagrad": optimizers.Adagrad(0.05, eps=0.5, initial_accumulator_value=0.1),
    "rowwise": optimizers.RowWiseAdagrad(0.05, eps=0.5),
    "partial_adam": optimizers.PartialRowWiseAdam(0.05, b2=0.99, eps=0.1, weight_decay=0.1),
    "lamb": optimizers.LAMB(0.05, b2=0.99, eps=0.1, weight_decay=0.1),
    "partial_lamb": optimizers.PartialRowWiseLAMB(0.05, b2=0.99, eps=0.1, weight_decay=0.1),
    "lars": optimizers.LARSSGD(0.5, eta=0.05, weight_decay=0.1),
    "rowwise_l2": optimizers.RowWiseAdagrad(
        0.05, eps=0.5, weight_decay=0.1, weight_decay_mode="l2"
    ),
    "rowwise_decoupled": optimizers.RowWiseAdagrad(
        0.05, eps=0.5, weight_decay=0.1, weight_decay_mode="decoupled", max_norm=1.25
    ),
    "adam_decayed": optimizers.Adam(0.01, b2=0.99, eps=0.1, weight_decay=0.1),
    "adam_rowwise": optimizers.Adam(
        0.01, b2=0.99, eps=0.1, weight_decay=0.1, rowwise_bias_correction=True
    ),
    "rmsprop": optimizers.RowWiseRMSProp(0.02, eps=0.5, ar_alpha=4.0, min_shrinkage=0.8),
    "ftrl": optimizers.FTRL(
        0.1,
        l1_regularization_strength=0.05,
        l2_regularization_strength=0.1,
        beta=0.2,
        initial_accumulator_value=1.0,
    ),
    "ftrl_multiplied": optimizers.FTRL(
        0.1,
        learning_rate_power=-0.7,
        l1_regularization_strength=0.05,
        beta=0.2,
        initial_accumulator_value=1.0,
        multiply_linear_by_learning_rate=True,
    ),
    "momentum": optimizers.AdagradMomentum(0.02, eps=0.5),
    "momentum_nesterov": optimizers.AdagradMomentum(
        0.02, b2=0.9, eps=0.5, exponent=3.0, nesterov=True
    ),
    "counter_increase": optimizers.CounterRowWiseAdagrad(
        0.02,
        eps=0.5,
        halflife=5.0,
        weight_decay=0.1,
        weight_decay_mode="l2",
        learning_rate_mode="tail_id_increase",
        adjustment_iter=3.0,
        adjustment_ub=0.5,
        tail_id_threshold=0.25,
        tail_id_threshold_is_ratio=True,
        max_counter=9.0,
    ),
    "counter_decrease": optimizers.CounterRowWiseAdagrad(
        0.05,
        eps=0.5,
        halflife=0.0,
        weight_decay=0.1,
        weight_decay_mode="decoupled",
        learning_rate_mode="tail_id_decrease",
        max_counter=5.0,
    ),
    "counter_sgd": optimizers.CounterRowWiseAdagrad(
        0.02, eps=0.5, learning_rate_mode="counter_sgd", tail_id_threshold=2.0
    ),
    "counter_adagradw": optimizers.CounterRowWiseAdagrad(
        0.02, eps=0.5, weight_decay=1.0, weight_decay_mode="adagradw", adjustment_iter=2.0
    ),
    "counter_adagradw_bounded": optimizers.CounterRowWiseAdagrad(
        0.02,
        eps=0.5,
        halflife=-2.0,
        weight_decay=1.0,
        weight_decay_mode="adagradw",
        adjustment_ub=0.05,
    ),
    "cow_clip": optimizers.CowClip(
        0.05,
        eps=0.5,
        halflife=4.0,
        weight_decay=0.1,
        weight_decay_mode="l2",
        weight_norm_coefficient=0.1,
        lower_bound=0.01,
    ),
    "cow_clip_decoupled": optimizers.CowClip(
        0.05, eps=0.5, weight_decay=0.1, weight_decay_mode="decoupled", lower_bound=0.01
    ),
}
RULES = {name: (rule, MODELS[type(rule)](rule)) for name, rule in OPTIONS.items()}
