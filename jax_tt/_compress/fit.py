"""Fits scales, offsets, levels and rotations to rows, for small squared errors.

As in Lloyd, "Least squares quantization in PCM", 1982, and Gong et al., "Iterative quantization: a Procrustean approach
to learning binary codes", 2013, two steps alternate: numbers are rounded to the nearest levels; then scales, offsets,
levels and rotation minimise the squared error for these choices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._kinds.quantized import codec

# Ranges of a row that are tried, as shares of the distance of its minimum and maximum, and steps of least squares from
# the best of them.
_SHARES = 13
_SMALLEST = 0.4
_STEPS = 4
_TINY = 1e-30

Best = tuple[jax.Array, jax.Array, jax.Array]  # the error, scale and offset of rows


@functools.partial(jax.jit, static_argnums=1)
def clipped(rows: jax.Array, bits: int, levels: jax.Array | None) -> jax.Array:
    """Packed rows of ``[n, D]`` whose scales and offsets are chosen for small squared errors.

    Numbers may be below the lowest level or above the highest. No row has a larger error than in `codec.encoded`.
    """
    rows = rows.astype(jnp.float32)
    scale, offset = _ranges(rows, bits, levels)
    codes = codec.nearest(codec.scaled(rows, scale, offset), bits, levels)
    return codec.joined(scale, offset, codes, bits)


@functools.partial(jax.jit, static_argnames=("bits", "fits_levels", "fits_rotation", "iterations"))
def fitted(
    rows: jax.Array,
    weights: jax.Array,
    levels: jax.Array | None,
    rotation: jax.Array,
    *,
    bits: int,
    fits_levels: bool,
    fits_rotation: bool,
    iterations: int,
) -> tuple[jax.Array | None, jax.Array]:
    """Fits levels ``[2 ** bits]``, in ascending order, or a rotation ``[D, D]``, or both; returns both.

    Rows are ``[n, D]``, and weights of their squared errors ``[n]``. No levels are uniform ones that are not fitted.
    """

    def step(_: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        scale, offset, rotation, levels = carry
        at = (rows @ rotation.T - offset) / scale
        codes = codec.nearest(at, bits, levels)
        if fits_levels:
            levels = _means(at, codes, weights[:, None] * scale**2, levels)
        rounded = codec.levels_of(codes, levels)
        if fits_rotation:
            product = (weights[:, None] * (scale * rounded + offset)).T @ rows
            left, _, right = jnp.linalg.svd(product, full_matrices=False)
            rotation = left @ right
        scale, offset = _least_squares(rows @ rotation.T, rounded, scale)
        return scale, offset, rotation, levels

    first = _ranges(rows @ rotation.T, bits, levels)
    scale, offset = (x.astype(jnp.float32)[:, None] for x in first)
    carry = scale, offset, rotation, levels
    _, _, rotation, levels = lax.fori_loop(0, iterations, step, carry)
    return levels, rotation


def _means(at: jax.Array, codes: jax.Array, weights: jax.Array, levels: jax.Array) -> jax.Array:
    """The weighted mean of the numbers that are rounded to each level; the old level if there are none."""
    weights, ids = jnp.broadcast_to(weights, at.shape), codes.ravel().astype(jnp.int32)
    sums = jax.ops.segment_sum((weights * at).ravel(), ids, len(levels))
    counts = jax.ops.segment_sum(weights.ravel(), ids, len(levels))
    return jnp.sort(jnp.where(counts > 0, sums / jnp.maximum(counts, _TINY), levels))


def _ranges(rows: jax.Array, bits: int, levels: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Scales and offsets of rows, float16 ``[n]``."""
    first = codec.spanning(rows, bits)
    whole, lowest = (x.astype(jnp.float32) for x in first)

    def better(best: Best, scale: jax.Array, offset: jax.Array) -> Best:
        scale, offset = codec.half_of(scale), codec.half_of(offset)
        # Others are out of the range of float16.
        valid = (scale > 0) & jnp.isfinite(scale) & jnp.isfinite(offset)
        scale = jnp.where(valid, scale, jnp.ones_like(scale))
        error = _errors(rows, scale, offset, bits, levels)
        wins = valid & (error < best[0])
        return (
            jnp.where(wins, error, best[0]),
            jnp.where(wins, scale, best[1]),
            jnp.where(wins, offset, best[2]),
        )

    def tried(best: Best, share: jax.Array) -> tuple[Best, None]:
        """Shrinks the range around its middle."""
        beside = (1 - share) / 2 * codec.highest(bits)
        return better(best, share * whole, lowest + beside * whole), None

    def stepped(_: Any, best: Best) -> Best:
        scale, offset = (x.astype(jnp.float32)[:, None] for x in best[1:])
        codes = codec.nearest((rows - offset) / scale, bits, levels)
        scale, offset = _least_squares(rows, codec.levels_of(codes, levels), scale)
        return better(best, scale[:, 0], offset[:, 0])

    best = _errors(rows, *first, bits, levels), *first
    best, _ = lax.scan(tried, best, jnp.linspace(1.0, _SMALLEST, _SHARES)[1:])
    _, scale, offset = lax.fori_loop(0, _STEPS, stepped, best)
    return scale, offset


def _errors(
    rows: jax.Array, scale: jax.Array, offset: jax.Array, bits: int, levels: jax.Array | None
) -> jax.Array:
    """The squared errors of rows, ``[n]``."""
    at = codec.scaled(rows, scale, offset)
    if levels is None:
        away = (at - jnp.clip(jnp.rint(at), 0, codec.highest(bits))) ** 2
    else:
        # Looking levels up would take longer.
        away = functools.reduce(jnp.minimum, [(at - level) ** 2 for level in levels])
    return jnp.sum(away, axis=-1) * scale.astype(jnp.float32) ** 2


def _least_squares(
    rows: jax.Array, levels: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scales and offsets ``[n, 1]`` that bring levels ``[n, D]`` closest to rows; the old scale if all are equal."""
    mean, of_levels = (jnp.mean(x, axis=1, keepdims=True) for x in (rows, levels))
    away = levels - of_levels
    square = jnp.sum(away**2, axis=1, keepdims=True)
    slope = jnp.sum(away * (rows - mean), axis=1, keepdims=True) / jnp.maximum(square, _TINY)
    scale = jnp.where(slope > 0, slope, scale)
    return scale, mean - scale * of_levels
