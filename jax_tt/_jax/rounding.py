"""From the types of parameters to those of sums, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._jax.row_sums import sums_by_row
from jax_tt._jax.vma import vary_over, varying_axes


def gathered(param: jax.Array, digits: jax.Array) -> jax.Array:
    """Slices of a parameter in its accumulator type."""
    return _taken(param.shape[0], param, digits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _taken(count: int, param: jax.Array, digits: jax.Array) -> jax.Array:
    del count
    # On a CPU, XLA converts all of a parameter of 16 bits before it gathers from it, but not of its bits.
    stored = lax.bitcast_convert_type(param, jnp.uint16) if param.dtype.itemsize == 2 else param
    # Wrapping negative ids adds the number of rows, which may overflow the type of the ids.
    taken = stored.at[digits].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return lax.bitcast_convert_type(taken, param.dtype).astype(accumulator(param.dtype))


@_taken.defjvp
def _taken_jvp(count: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """The tangents are taken by the transpose of the sums that their cotangents need, in the accumulator type."""
    (param, digits), (tangent, _) = primals, tangents
    out = _taken(count, param, digits)
    tangent = tangent.astype(out.dtype)
    shape, axes = (digits.size, *param.shape[1:]), varying_axes(out)

    def sums(values: jax.Array) -> jax.Array:
        # Sums of no values vary over no axis yet.
        return vary_over(sums_by_row(count, digits.reshape(-1), values), axes)

    _, taken_by = jax.vjp(sums, jnp.zeros_like(out).reshape(shape))
    (taken,) = taken_by(vary_over(tangent, axes))
    return out, taken.reshape(out.shape)


def exactly(take: Callable[[jax.Array], jax.Array], array: jax.Array) -> jax.Array:
    """``take(array)``, which takes elements of an array that may be on several devices, bit for bit.

    XLA adds the rows of one device to the zeros of the others, which changes negative zeros and numbers close to them,
    and some of the NaNs, which the bytes of quantized rows may look like.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return take(array)
    bits = take(lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}"))
    return lax.bitcast_convert_type(bits, array.dtype)


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
