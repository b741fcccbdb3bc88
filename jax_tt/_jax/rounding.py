"""Rounding of results to the types of parameters and optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp


def round_to(values: jax.Array, dtype: Any, key: jax.Array | None) -> jax.Array:
    """Casts ``values`` to ``dtype``; with a key, stochastically if that is a 16-bit type.

    The result is one of the two neighbours of a value in ``dtype``, with probabilities that make the mean exact, so
    that updates far below one unit in the last place are not lost.
    """
    nearest = values.astype(dtype)
    if key is None or nearest.dtype.itemsize != 2 or nearest.dtype == values.dtype:
        return nearest
    error = values - nearest.astype(values.dtype)
    toward = jnp.where(error > 0, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(nearest, toward)
    gap = jnp.abs(other.astype(values.dtype) - nearest.astype(values.dtype))
    # An exact value has error 0 and does not move; an overflow (gap inf or nan) stays infinite.
    move = jax.random.uniform(key, values.shape, values.dtype) * gap < jnp.abs(error)
    return jnp.where(move & jnp.isfinite(gap), other, nearest)


def of_array(key: jax.Array | None, number: int) -> jax.Array | None:
    """The key of one of several arrays that a step changes; None without stochastic rounding."""
    return None if key is None else jax.random.fold_in(key, number)
