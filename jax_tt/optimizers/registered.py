"""Rules of extensions, in C++ and CUDA."""

from __future__ import annotations

from typing import Any

import jax

from jax_tt._base import ffi
from jax_tt._base.version import __version__
from jax_tt.optimizers._base import Optimizer


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


def check_registered(optimizer: Optimizer, name: str, hyper: jax.Array, accum: Any) -> None:
    """Raises unless the rule of an extension has the slots of ``optimizer`` and its hyper-parameters ``hyper``.

    These must have the type ``accum``, in which rows are computed.
    """
    given = type(optimizer).__name__
    rule = ffi.rule(name)
    if rule is None:
        raise ValueError(
            f"optimizer: {given} is the native rule {name!r}, which this process has not registered. Pass what the "
            "extension exports to jax_tt.optimizers.register, and use the name that it returns as native_kind."
        )
    rowwise = [slot.rowwise for slot in optimizer.slots if slot.stepped]
    expected = [False] * rule.entry_slots + [True] * rule.row_slots
    if rowwise != expected:
        raise ValueError(
            f"optimizer: {given}.slots has {rowwise.count(False)} slots per entry and {rowwise.count(True)} per row, "
            f"in the order rowwise={rowwise}; expected those of the native rule {name!r}: "
            f"{rule.entry_slots} per entry, then {rule.row_slots} per row."
        )
    expected = (rule.hyperparameters,)
    if hyper.shape != expected or hyper.dtype != accum:
        raise ValueError(
            f"optimizer: {given}.hyperparameters returns {hyper.dtype} of shape {hyper.shape}; expected those of the "
            f"native rule {name!r}, {accum} of shape {expected}, as at_step of jax_tt.optimizers returns them."
        )
