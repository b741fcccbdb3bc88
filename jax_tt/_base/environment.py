"""The environment variables that the package reads, and ``method=``.

An invalid value of a variable is an error already on import.
"""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Callable
from typing import Literal, cast, get_args

from jax_tt._base.arguments import one_of

_PREFIX = "JAX_TT_"
# cuda_emulated: the CUDA kernels, run by the processor thread by thread; for tests, in builds that have it.
Method = Literal["auto", "reference", "native", "cuda_emulated"]
METHODS = get_args(Method)


def _number(at_least: int) -> Callable[[str, str], object]:
    def check(name: str, value: str) -> None:
        if not re.fullmatch("[0-9]{1,18}", value) or int(value) < at_least:
            raise ValueError(f"{name}: got {value!r}; expected an integer >= {at_least}.")

    return check


def _choice(*choices: str) -> Callable[[str, str], object]:
    return lambda name, value: one_of(name, value, choices)


# The native module itself reads the variables of the CPU, once, in its first op.
_CHECKS = {
    "JAX_TT_METHOD": _choice(*METHODS),
    "JAX_TT_NUM_THREADS": _number(at_least=1),
    "JAX_TT_CPU_ISA": _choice("baseline", "x86_64_v3"),
    "JAX_TT_EMULATION_SEED": _number(at_least=0),
}


def variable(name: str) -> str | None:
    """The validated value of a variable; None if it is not set or empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        return None
    _CHECKS[name](name, value)
    return value


def check() -> None:
    """Raises for invalid values of a variable."""
    for name in _CHECKS:
        if name in os.environ:
            variable(name)


def resolve_method(method: str) -> Method:
    """Checks ``method``; ``JAX_TT_METHOD`` replaces ``"auto"``."""
    if not _CHECKS.keys().isdisjoint(os.environ):
        check()  # it may have changed since the import, before the native ops read it
    if not isinstance(method, str) or method not in METHODS:
        one_of("method", method, METHODS, "; 'reference' is pure JAX and runs everywhere")
    if method == "auto" and "JAX_TT_METHOD" in os.environ:
        method = variable("JAX_TT_METHOD") or method
    return cast(Method, method)


def warn_of_misspelt() -> None:
    """Warns about variables that are not read but have a similar name to one that is."""
    suffixes = {name.removeprefix(_PREFIX): name for name in _CHECKS}
    for name in os.environ:
        if not name.startswith(_PREFIX) or name in _CHECKS:
            continue
        for close in difflib.get_close_matches(name.removeprefix(_PREFIX), suffixes, 1, 0.8):
            warnings.warn(
                f"The environment variable {name} is set, but jax_tt reads {suffixes[close]}.",
                RuntimeWarning,
                stacklevel=3,
            )
