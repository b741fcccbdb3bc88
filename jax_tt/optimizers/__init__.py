"""Update rules that run inside the backward pass of a fused operation."""

from jax_tt.optimizers._base import Optimizer as Optimizer
from jax_tt.optimizers._base import Slot as Slot
from jax_tt.optimizers.adagrad import Adagrad as Adagrad
from jax_tt.optimizers.adam import Adam as Adam
from jax_tt.optimizers.rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad
from jax_tt.optimizers.sgd import SGD as SGD

RULES: dict[int, type[Optimizer]] = {
    rule.native_kind: rule for rule in (SGD, Adagrad, RowWiseAdagrad, Adam)
}
