"""Types in which sums are computed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.cache
def accumulator(*dtypes: Any) -> Any:
    """Type in which products of these types are accumulated: float32, or float64 if any is float64."""
    # Spelled out because jnp.promote_types refuses under strict dtype promotion.
    return jnp.dtype(
        jnp.float64 if any(jnp.dtype(d) == jnp.float64 for d in dtypes) else jnp.float32
    )


def widest(left: Any, right: Any) -> Any:
    """Result type of an op on two floating types, the same under strict dtype promotion."""
    left, right = jnp.dtype(left), jnp.dtype(right)
    return left if left == right else accumulator(left, right)


def x64_enabled() -> bool:
    """Whether JAX keeps 64-bit types here, by configuration or by context."""
    return jax.dtypes.canonicalize_dtype(jnp.int64) == jnp.int64
