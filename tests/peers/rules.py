"""Update rules that both libraries have; a row of `RULES` is all that a rule needs to be compared."""

from typing import Any, NamedTuple

import numpy as np

from jax_tt import optimizers
from tests.peers.tables import NEIGHBOURS, Tables
from tests.peers.tbe import (
    TBE,
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EmbOptimType,
    LearningRateMode,
    WeightDecayMode,
)

RATE = 0.1


class Rule(NamedTuple):
    """A rule of jax_tt and the one of FBGEMM that it is compared with.

    Attributes:
        ours: the rule of jax_tt.
        theirs: arguments of FBGEMM's operator.
        states: its names of the optimizer states by our names of the slots.
        own_sizes: whether FBGEMM lets features have numbers of bags of their own.
        tables: FBGEMM 1.8 on the CPU applies the weight decay of row-wise Adagrad only to tables that several features
            share: a rule with one needs ``Tables(of_features=(0, 0, 1, 1, 2, 2))``.
        rtol, atol: of values and slots; those of FBGEMM's tests are 1e-5 for SGD and 1e-4 for Adagrad, after one step.
    """

    ours: optimizers.Optimizer
    theirs: dict[str, Any]
    states: dict[str, str]
    own_sizes: bool
    tables: Tables = NEIGHBOURS
    rtol: float = 1e-5
    atol: float = 1e-5

    def tbe(self, tables: Tables, values: list[np.ndarray], **options: Any) -> TBE:
        """FBGEMM's operator with the rule."""
        return TBE(tables, values, learning_rate=RATE, **self.theirs, **options)


SUM = {"slot_sum_0": "sum"}
COUNTED = SUM | {"slot_last_step_0": "prev_iter", "slot_count_0": "row_counter"}
# An eps this large shows where it is added.
EPS = 0.05
DECAY = 0.2
ROWWISE = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": EPS, "weight_decay": DECAY}
SHARED = Tables(of_features=(0, 0, 1, 1, 2, 2))
# Averages the rows before every third step.
IN_PLACE = Rule(
    optimizers.EMAInPlaceRowWiseAdagrad(RATE, EPS, average_every=3, start=5, rate=0.3),
    {
        "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
        "eps": EPS,
        "emainplace_mode": EmainplaceModeDefinition(step_ema=3, step_start=5, step_ema_coef=0.3),
    },
    SUM,
    False,
)
RULES = {
    "sgd": Rule(optimizers.SGD(RATE), {"optimizer": EmbOptimType.EXACT_SGD}, {}, True),
    "adagrad": Rule(
        optimizers.Adagrad(RATE, EPS),
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": EPS},
        SUM,
        False,
    ),
    "rowwise adagrad": Rule(
        optimizers.RowWiseAdagrad(RATE, EPS),
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": EPS},
        SUM,
        True,
    ),
    "rowwise adagrad, l2": Rule(
        optimizers.RowWiseAdagrad(RATE, EPS, weight_decay=DECAY, weight_decay_mode="l2"),
        ROWWISE | {"weight_decay_mode": WeightDecayMode.L2},
        SUM,
        False,
        SHARED,
    ),
    "rowwise adagrad, decoupled": Rule(
        optimizers.RowWiseAdagrad(RATE, EPS, weight_decay=DECAY, weight_decay_mode="decoupled"),
        ROWWISE | {"weight_decay_mode": WeightDecayMode.DECOUPLE},
        SUM,
        False,
        SHARED,
    ),
    "counter": Rule(
        optimizers.CounterRowWiseAdagrad(
            RATE,
            EPS,
            halflife=3.0,
            weight_decay=DECAY,
            weight_decay_mode="decoupled",
            learning_rate_mode="counter_sgd",
            adjustment_ub=0.7,
        ),
        ROWWISE
        | {
            "weight_decay_mode": WeightDecayMode.COUNTER,
            "counter_based_regularization": CounterBasedRegularizationDefinition(
                counter_weight_decay_mode=CounterWeightDecayMode.DECOUPLE,
                counter_halflife=3,
                learning_rate_mode=LearningRateMode.COUNTER_SGD,
                adjustment_ub=0.7,
            ),
        },
        COUNTED,
        False,
        SHARED,
    ),
    "cowclip": Rule(
        optimizers.CowClip(
            RATE,
            EPS,
            halflife=3.0,
            weight_decay=DECAY,
            weight_decay_mode="l2",
            weight_norm_coefficient=0.3,
            lower_bound=0.01,
        ),
        ROWWISE
        | {
            "weight_decay_mode": WeightDecayMode.COWCLIP,
            "cowclip_regularization": CowClipDefinition(
                counter_weight_decay_mode=CounterWeightDecayMode.L2,
                counter_halflife=3,
                weight_norm_coefficient=0.3,
                lower_bound=0.01,
            ),
        },
        COUNTED,
        False,
        SHARED,
    ),
}
