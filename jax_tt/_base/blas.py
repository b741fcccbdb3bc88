"""The threads of numpy's BLAS."""

from __future__ import annotations

from contextlib import AbstractContextManager

from threadpoolctl import threadpool_limits


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which BLAS uses one thread.

    Where products are small, more threads gain little, and they wait for each other if other threads or programs use
    the cores. One thread also gives the same bits on any number of cores.
    """
    return threadpool_limits(1, user_api="blas")
