"""The common part of the forms of row-wise Adagrad that count the uses of a row."""

import dataclasses
import math
from typing import ClassVar

from jax_tt.optimizers._base import Optimizer, Scalar, Slot, check_number, check_scalar


@dataclasses.dataclass(frozen=True)
class Counted(Optimizer):
    """Hyper-parameters and slots of a rule with a counter."""

    learning_rate: Scalar
    eps: Scalar = 1e-10
    initial_accumulator_value: float = 0.0
    halflife: Scalar = -1.0
    weight_decay: Scalar = 0.0
    initial: ClassVar[frozenset[str]] = frozenset({"initial_accumulator_value"})

    def __post_init__(self) -> None:
        check_scalar("learning_rate", self.learning_rate, 0.0)
        check_scalar("eps", self.eps, 0.0)
        check_number("initial_accumulator_value", self.initial_accumulator_value, 0.0)
        check_scalar("halflife", self.halflife, -math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("sum", True, self.initial_accumulator_value),
            Slot("last_step", True, 0.0),
            Slot("count", True, 0.0),
        )
