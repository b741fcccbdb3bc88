"""The fused rules in numpy float64, one row at a time, written from the formulas of the systems that they come from.

A model is a function of the row ``w``, the gradient ``g``, the slots of the row as a list, and the step ``t``, counted
from 1. It returns the new row and the new slots.
"""

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


def partial_rowwise_adam(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        m = rule.b1 * s[0] + (1 - rule.b1) * g
        v = rule.b2 * s[1] + (1 - rule.b2) * np.mean(g * g)
        r = adam_step(m, v, rule.b1, rule.b2, rule.eps, t) + rule.weight_decay * w
        return w - rule.learning_rate * r, [m, v]

    return step


def lamb(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        m = rule.b1 * s[0] + (1 - rule.b1) * g
        v = rule.b2 * s[1] + (1 - rule.b2) * g * g
        r = adam_step(m, v, rule.b1, rule.b2, rule.eps, t) + rule.weight_decay * w
        return w - rule.learning_rate * ratio(norm(w), norm(r)) * r, [m, v]

    return step


def partial_rowwise_lamb(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        m = rule.b1 * s[0] + (1 - rule.b1) * g
        v = rule.b2 * s[1] + (1 - rule.b2) * np.mean(g * g)
        r = adam_step(m, v, rule.b1, rule.b2, rule.eps, t) + rule.weight_decay * w
        return w - rule.learning_rate * ratio(norm(w), norm(r)) * r, [m, v]

    return step


def lars_sgd(rule: Any) -> Model:
    def step(w: Row, g: Row, s: State, t: int) -> tuple[Row, State]:
        trust = ratio(rule.eta * norm(w), norm(g) + rule.weight_decay * norm(w))
        m = rule.momentum * s[0] + rule.learning_rate * trust * (g + rule.weight_decay * w)
        return w - m, [m]

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


# A name for each option of a rule; an eps that is large enough to show where it is added.
RULES: dict[str, tuple[optimizers.Optimizer, Model]] = {
    name: (rule, model(rule))
    for name, rule, model in (
        (
            "partial_adam",
            optimizers.PartialRowWiseAdam(0.05, b2=0.99, eps=0.1, weight_decay=0.1),
            partial_rowwise_adam,
        ),
        ("lamb", optimizers.LAMB(0.05, b2=0.99, eps=0.1, weight_decay=0.1), lamb),
        (
            "partial_lamb",
            optimizers.PartialRowWiseLAMB(0.05, b2=0.99, eps=0.1, weight_decay=0.1),
            partial_rowwise_lamb,
        ),
        ("lars", optimizers.LARSSGD(0.5, eta=0.05, weight_decay=0.1), lars_sgd),
        (
            "rowwise_l2",
            optimizers.RowWiseAdagrad(0.05, eps=0.5, weight_decay=0.1, weight_decay_mode="l2"),
            rowwise_adagrad,
        ),
        (
            "rowwise_decoupled",
            optimizers.RowWiseAdagrad(
                0.05, eps=0.5, weight_decay=0.1, weight_decay_mode="decoupled", max_norm=1.25
            ),
            rowwise_adagrad,
        ),
    )
}
