"""numpy: a large float32 matrix product, the reference for the rate of the machine."""

import numpy as np

from benchmarks.timing import Call


def matmul(size: int) -> tuple[Call, float]:
    """The product of two square matrices into a third, and its flops."""
    rng = np.random.default_rng(3)
    a, b = rng.random((2, size, size), np.float32)
    out = np.empty_like(a)
    return lambda i: np.matmul(a, b, out=out), 2.0 * size**3
