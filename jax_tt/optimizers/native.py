"""Rules in the native operations: those of the library, and those of extensions in C++ and CUDA."""

from __future__ import annotations

from typing import Any

from jax_tt._base import ffi
from jax_tt._base.version import __version__
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

# The rules of the library by the names of their native rules.
RULES: dict[str, type[Optimizer]] = {
    "Sgd": SGD,
    "Adagrad": Adagrad,
    "RowWiseAdagrad": RowWiseAdagrad,
    "RegularizedRowWiseAdagrad": RowWiseAdagrad,
    "Adam": Adam,
    "DecayedAdam": Adam,
    "RowWiseCorrectedAdam": Adam,
    "PartialRowWiseAdam": PartialRowWiseAdam,
    "Lamb": LAMB,
    "PartialRowWiseLamb": PartialRowWiseLAMB,
    "LarsSgd": LARSSGD,
    "RowWiseRmsProp": RowWiseRMSProp,
    "Ftrl": FTRL,
    "AdagradMomentum": AdagradMomentum,
    "CounterRowWiseAdagrad": CounterRowWiseAdagrad,
    "CowClip": CowClip,
    "GlobalDecayRowWiseAdagrad": GlobalDecayRowWiseAdagrad,
}


def register(rule: Any) -> str:
    """Hands a rule that an extension exports to the native operations.

    The rule is a capsule named ``"jax_tt.rule"`` with the address of a ``jax_tt::ExportedRule``, which
    ``jax_tt::ExportRule`` makes of a C++ template. It stays registered as long as the process lives. Compiled and
    exported programs have its name: a process that loads one must have registered a rule of this name before it runs
    the program. Registering a rule again has no effect.

    Args:
        rule: the capsule.

    Returns:
        Its name, the `native_kind` of the class of rules that uses it.

    Raises:
        ValueError: it is not such a capsule, it was compiled with headers of another version of jax_tt, or this process
            has another rule of the same name.
        RuntimeError: this installation has no native operations.

    >>> import jax_tt
    >>> jax_tt.optimizers.register("lion")
    Traceback (most recent call last):
    ValueError: rule: expected a capsule of the name 'jax_tt.rule' with the address of a jax_tt::ExportedRule
    """
    if reason := ffi.why_unavailable("cpu"):
        raise RuntimeError(f"rule: it extends the native operations, but {reason}.")
    return ffi.add_rule(rule, __version__)
