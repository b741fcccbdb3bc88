"""What the card at hand can do at most: copies of memory, and products in float32 and TF32."""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

_SECONDS = 0.3


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Bytes per second, read and written, and flops per second in float32 and in TF32, as measured."""

    bytes: float
    flops: float
    tensor_flops: float


@functools.cache
def of_this_card(quick: bool) -> Peaks:
    """Measures each for some tenths of a second; once per process."""
    words, size, calls = (1 << 12, 64, 2) if quick else (1 << 28, 8192, 4)

    # Each copy reads what the one before wrote, in other memory.
    copy = jax.jit(lambda x: x + 1)
    copied = jax.random.normal(jax.random.key(0), (words,))
    copy_seconds = _fastest(lambda: copy(copied), calls)

    # Of random numbers, since a card has higher clocks with equal ones.
    values, factor = jax.random.normal(jax.random.key(1), (2, size, size))

    def product(precision: str) -> float:
        call = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
        return 2 * size**3 / _fastest(lambda: call(values, factor), calls)

    return Peaks(8 * words / copy_seconds, product("highest"), product("tensorfloat32"))


def _fastest(call: Callable[[], jax.Array], calls: int) -> float:
    """Seconds of a call in the fastest of some rows of them, the last ones at the clocks of a busy card."""
    jax.block_until_ready(call())  # compiles
    seconds: list[float] = []
    end = time.monotonic() + _SECONDS
    while len(seconds) < 5 or time.monotonic() < end:
        start = time.perf_counter()
        done = [call() for _ in range(calls)]
        jax.block_until_ready(done)
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)
