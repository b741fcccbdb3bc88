"""From the types of parameters to those of sums, and back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator
from jax_tt._jax.row_sums import sums_by_row
from jax_tt._jax.vma import vary_over, varying_axes


def gathered(param: jax.Array, digits: jax.Array) -> jax.Array:
    """Slices of a parameter in its accumulator type."""
    # Up-cast before the gather: its transpose then sums duplicate gradients in the accumulator type.
    wide = param.astype(accumulator(param.dtype))
    # Wrapping negative ids adds the number of rows, which may overflow the type of the ids.
    return _taken(wide.shape[0], wide, digits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _taken(count: int, wide: jax.Array, digits: jax.Array) -> jax.Array:
    del count
    return wide.at[digits].get(mode="promise_in_bounds", wrap_negative_indices=False)


@_taken.defjvp
def _taken_jvp(count: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The tangents are taken by the transpose of the sums that their cotangents need."""
    (wide, digits), (tangent, _) = primals, tangents
    out = _taken(count, wide, digits)
    shape = (digits.size, *wide.shape[1:])

    def sums(values: jax.Array) -> jax.Array:
        return sums_by_row(count, digits.reshape(-1), values)

    _, taken_by = jax.vjp(sums, jnp.zeros_like(out).reshape(shape))
    (taken,) = taken_by(vary_over(tangent, varying_axes(out)))
    return out, taken.reshape(out.shape)


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


def fold_key(key: jax.Array | None, number: int) -> jax.Array | None:
    """The key of one of several arrays that a step changes; None without stochastic rounding."""
    return None if key is None else jax.random.fold_in(key, number)
