"""The number of BLAS threads while ids are ordered."""

from __future__ import annotations

from contextlib import AbstractContextManager

from jax_tt._base.requires import require


def one_blas_thread(purpose: str) -> AbstractContextManager[object]:
    """A context in which BLAS uses one thread; the error if threadpoolctl is missing names ``purpose``.

    The products are small, so more threads gain little, and they wait for each other if other programs use the cores.
    One thread also gives the same bits on any number of cores.
    """
    return require("threadpoolctl", purpose, "order").threadpool_limits(1, user_api="blas")
