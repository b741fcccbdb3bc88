"""The rules of the library in the native operations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jax_tt._base import ffi
from jax_tt.optimizers._base import Optimizer
from jax_tt.optimizers.adagrad import Adagrad, AdagradMomentum, RowWiseAdagrad
from jax_tt.optimizers.adam import LAMB, Adam, PartialRowWiseAdam, PartialRowWiseLAMB
from jax_tt.optimizers.counted_adagrad import (
    CounterRowWiseAdagrad,
    CowClip,
    GlobalDecayRowWiseAdagrad,
)
from jax_tt.optimizers.ftrl import FTRL
from jax_tt.optimizers.registered import check_registered
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


def check_native(platform: str, optimizer: Optimizer, hyper: jax.Array, accum: Any) -> None:
    """Raises unless the native operations of a platform have the rule, and it is that of its class.

    ``hyper`` are its hyper-parameters, and ``accum`` is the type in which rows are computed.
    """
    name, given = optimizer.kind, type(optimizer)
    assert name is not None  # such rules are no native ones
    owner = RULES.get(name)
    if owner is None:
        return check_registered(optimizer, name, hyper, accum)
    if given.update_rows is not owner.update_rows:
        raise ValueError(
            f"optimizer: {given.__name__} has the native rule {name!r}, which takes the steps of {owner.__name__} and "
            f"not those of {given.__name__}.update_rows. Register a rule in C++, and use its name as native_kind; or "
            "let the property kind return None, and update_rows runs on all platforms."
        )
    if name not in ffi.native_rules(platform):
        raise RuntimeError(
            f"optimizer: the native module for {platform} does not have the rule {name!r} of {given.__name__}; it is "
            "older than the sources. Compile it with `make native`."
        )
