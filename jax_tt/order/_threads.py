"""How many threads BLAS has while ids are ordered."""

from __future__ import annotations

from contextlib import AbstractContextManager

from jax_tt._requires import require


def one_blas_thread(purpose: str) -> AbstractContextManager[object]:
    """A context in which BLAS has one thread; ``purpose`` is named where threadpoolctl is missing.

    The products are small: more threads gain little, and wait for each other where other programs want the cores. And
    the same bits come out on any number of cores.
    """
    return require("threadpoolctl", purpose, "order").threadpool_limits(1, user_api="blas")
