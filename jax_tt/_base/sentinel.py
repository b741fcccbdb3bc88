"""The sentinel of a fused table, which stays at 1 only if the table is overwritten."""

from typing import Any

import jax.numpy as jnp

# Averages of ones round by less, one step of Adam at a learning rate of 1e-4 moves it by more. The same number as
# kSentinelTolerance of ffi/core/sentinel.h.
TOLERANCE = 2.0**-14


def holds(sentinel: Any) -> Any:
    """Whether each sentinel of an array is 1 up to rounding; False for NaN."""
    return abs(sentinel - 1) <= TOLERANCE


def kept(sentinel: Any) -> Any:
    """The sentinel after a step.

    An invalid one stays invalid, so that all further passes fail; rounding errors are reset to 1.
    """
    return jnp.where(holds(sentinel), 1, sentinel)


def untouched(sentinel: Any) -> Any:
    """Whether a sentinel is what a step returned: exactly 1."""
    return sentinel == 1


def spoilt(sentinel: Any) -> Any:
    """The sentinel where a step returned it untouched; otherwise one that no forward pass takes for rounding."""
    beyond = jnp.where(holds(sentinel), jnp.nan, sentinel)
    return jnp.where(untouched(sentinel), sentinel, beyond)
