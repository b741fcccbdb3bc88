"""Threads that compute as the thread that starts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jax_tt._base.dtypes import x64_enabled

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


def as_here(function: Callable[[_Given], _Result]) -> Callable[[_Given], _Result]:
    """The function with the default device and the types of this thread, which JAX keeps for each thread."""
    device: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    wide = x64_enabled()

    def call(given: _Given) -> _Result:
        with jax.default_device(device), jax.enable_x64(wide):
            return function(given)

    return call
