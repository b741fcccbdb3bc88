"""Rules in the native operations: those of the library, and those of extensions in C++ and CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base import ffi
from jax_tt._base.version import __version__
from jax_tt.optimizers._base import Hyper, Optimizer
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


def stacked(platform: str, optimizer: Optimizer, hyper: Hyper, accum: Any) -> jax.Array:
    """The hyper-parameters of a step ``[H]`` in the order of the native rule, for the native operations of a platform.

    Raises:
        ValueError: the native rule takes other steps, other slots or other hyper-parameters than ``optimizer``, or has
            not been registered. Hyper-parameters have the type ``accum``, in which rows are computed.
        RuntimeError: the native module is older than the rule.
    """
    name, given = optimizer.kind, type(optimizer).__name__
    assert name is not None  # such rules are no native ones
    rule, owner = ffi.rule(platform, name), RULES.get(name)
    if owner is None and rule is None:
        raise ValueError(
            f"optimizer: {given} is the native rule {name!r}, which this process has not registered. Pass what the "
            "extension exports to jax_tt.optimizers.register, and use the name that it returns as native_kind."
        )
    if owner is not None and type(optimizer).update_rows is not owner.update_rows:
        raise ValueError(
            f"optimizer: {given} has the native rule {name!r}, which takes the steps of {owner.__name__} and "
            f"not those of {given}.update_rows. Register a rule in C++, and use its name as native_kind; or "
            "let the property kind return None, and update_rows runs on all platforms."
        )
    if rule is None:
        raise RuntimeError(
            f"optimizer: the native module for {platform} does not have the rule {name!r} of {given}; it is "
            "older than the sources. Compile it with `make native`."
        )
    rowwise = [slot.rowwise for slot in optimizer.slots if slot.stepped]
    if rowwise != [False] * rule.entry_slots + [True] * rule.row_slots:
        raise ValueError(
            f"optimizer: {given}.slots has {rowwise.count(False)} slots per entry and {rowwise.count(True)} per row, "
            f"in the order rowwise={rowwise}; expected those of the native rule {name!r}: "
            f"{rule.entry_slots} per entry, then {rule.row_slots} per row."
        )
    scalars = hyper if isinstance(hyper, Mapping) else {}
    taken: list[Any] = [scalars.get(field) for field in rule.hyperparameters]
    if any(getattr(value, "shape", None) != () or value.dtype != accum for value in taken):
        raise ValueError(
            f"optimizer: {given}.hyperparameters returns {jax.tree.map(_described, hyper)}; expected a dict with what "
            f"the native rule {name!r} takes, {', '.join(rule.hyperparameters)}, each a scalar of type {accum}, as "
            "Optimizer.hyperparameters and at_step of jax_tt.optimizers return them."
        )
    return jnp.stack(taken)


def _described(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)
