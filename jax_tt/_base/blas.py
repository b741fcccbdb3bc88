"""The threads of BLAS, of which numpy and scipy have one each."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which BLAS uses one thread.

    Where products are small, more threads gain little, and they wait for each other if other threads or programs use
    the cores. One thread also gives the same bits on any number of cores.
    """
    # Only libraries that are loaded are limited, and scipy loads its own when it is first used.
    importlib.import_module("scipy.linalg")
    return threadpool_limits(1, user_api="blas")
