"""Update rules that both libraries have; a row of `RULES` is all that a rule needs to be compared."""

from typing import Any, NamedTuple

import numpy as np

from jax_tt import optimizers
from tests.peers.tables import NEIGHBOURS, Tables
from tests.peers.tbe import TBE, EmbOptimType

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
# An eps this large shows where it is added.
EPS = 0.05
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
}
