"""Rows of an array by their numbers."""

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
