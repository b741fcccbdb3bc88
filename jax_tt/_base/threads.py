"""Threads: how many BLAS has, in numpy and in scipy, and threads that compute as the one that starts them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from threadpoolctl import threadpool_limits

from jax_tt._base.dtypes import x64_enabled


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which BLAS uses one thread.

    Where products are small, more threads gain little, and they wait for each other if other threads or programs use
    the cores. One thread also gives the same bits on any number of cores.
    """
    # Only libraries that are loaded are limited, and scipy loads its own when it is first used.
    importlib.import_module("scipy.linalg")
    return threadpool_limits(1, user_api="blas")


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
