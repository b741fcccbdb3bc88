"""The rules of the library in the native operations."""

from __future__ import annotations

from collections.abc import Iterable

from jax_tt.optimizers._base import Optimizer
from jax_tt.optimizers.adagrad import Adagrad, AdagradMomentum, RowWiseAdagrad
from jax_tt.optimizers.adam import LAMB, Adam, PartialRowWiseAdam, PartialRowWiseLAMB
from jax_tt.optimizers.counted_adagrad import (
    CounterRowWiseAdagrad,
    CowClip,
    GlobalDecayRowWiseAdagrad,
)
from jax_tt.optimizers.ftrl import FTRL
from jax_tt.optimizers.rowwise_rmsprop import RowWiseRMSProp
from jax_tt.optimizers.sgd import LARSSGD, SGD


def by_name(rules: Iterable[type[Optimizer]]) -> dict[str, type[Optimizer]]:
    """The classes by the names of their native rules.

    Raises:
        ValueError: two of them have the same name.
    """
    found: dict[str, type[Optimizer]] = {}
    for rule in rules:
        for name in rule.native_kinds():
            if name in found:
                raise ValueError(
                    f"native_kind: {found[name].__name__} and {rule.__name__} have the same one, {name!r}; expected "
                    "the name of another native rule for one of them."
                )
            found[name] = rule
    return found


RULES = by_name(
    (
        SGD,
        Adagrad,
        RowWiseAdagrad,
        Adam,
        PartialRowWiseAdam,
        LAMB,
        PartialRowWiseLAMB,
        LARSSGD,
        RowWiseRMSProp,
        FTRL,
        AdagradMomentum,
        CounterRowWiseAdagrad,
        CowClip,
        GlobalDecayRowWiseAdagrad,
    )
)
