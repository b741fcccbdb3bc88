"""Fits scales, offsets, levels and rotations to rows, for small squared errors.

As in Lloyd, "Least squares quantization in PCM", 1982, and Gong et al., "Iterative quantization: a Procrustean approach
to learning binary codes", 2013, two steps alternate: numbers are rounded to the nearest levels; then scales, offsets,
levels and rotation minimise the squared error for these choices.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._kinds.quantized import codec

# Ranges of a row that are tried, as shares of the distance of its minimum and maximum, and steps of least squares from
# the best of them.
_SHARES = 13
_SMALLEST = 0.4
_STEPS = 4
_TINY = 1e-30

Best = tuple[jax.Array, jax.Array, jax.Array]  # the error, scale and offset of rows


class Rounded(NamedTuple):
    """Rounded rows.

    Attributes:
        scale, offset: float16 ``[n]``.
        codes: the numbers, uint8 ``[n, D]``.
        errors: squared errors of the rows, float32 ``[n]``.
    """

    scale: Any
    offset: Any
    codes: Any
    errors: Any

    @property
    def headers(self) -> np.ndarray:
        """Scales and offsets as the first bytes of packed rows, uint8 ``[n, 4]``."""
        return np.stack([self.scale, self.offset], axis=1).view(np.uint8)


@functools.partial(jax.jit, static_argnames="clip")
def rounded(rows: jax.Array, bits: Any, levels: jax.Array | None, *, clip: bool) -> Rounded:
    """Rounds rows ``[n, D]`` to numbers of some bits.

    With ``clip``, scales and offsets are chosen for small squared errors: numbers may be below the lowest level or
    above the highest. No row has a larger error than without it. Without it, the result equals `codec.encoded`.
    """
    rows = rows.astype(jnp.float32)
    scale, offset = _ranges(rows, bits, levels) if clip else codec.spanning(rows, bits)
    codes = codec.nearest(codec.scaled(rows, scale, offset), bits, levels)
    wide, start = (x.astype(jnp.float32)[:, None] for x in (scale, offset))
    away = wide * codec.levels_of(codes, levels) + start - rows
    return Rounded(scale, offset, codes, jnp.sum(away**2, axis=1))


@functools.partial(jax.jit, static_argnames=("fits_levels", "fits_rotation"))
def fitted(
    rows: jax.Array,
    weights: jax.Array,
    levels: jax.Array | None,
    rotation: jax.Array,
    bits: Any,
    iterations: Any,
    *,
    fits_levels: bool,
    fits_rotation: bool,
) -> tuple[jax.Array | None, jax.Array]:
    """Fits levels, in ascending order and with infinities beyond ``2 ** bits``, or a rotation ``[D, D]``, or both.

    Returns both. Rows are ``[n, D]``, and weights of their squared errors ``[n]``. No levels are uniform ones that are
    not fitted.
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


def _ranges(rows: jax.Array, bits: Any, levels: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Scales and offsets of rows, float16 ``[n]``."""
    first = codec.spanning(rows, bits)
    whole, lowest = (x.astype(jnp.float32) for x in first)
    shares = jnp.linspace(1.0, _SMALLEST, _SHARES)

    def shrunk(k: Any, _: Best) -> tuple[jax.Array, jax.Array]:
        """Shrinks the range around its middle."""
        share = shares[jnp.minimum(k, _SHARES - 1)]
        beside = (1 - share) / 2 * codec.highest(bits)
        return share * whole, lowest + beside * whole

    def fit(_: Any, best: Best) -> tuple[jax.Array, jax.Array]:
        scale, offset = (x.astype(jnp.float32)[:, None] for x in best[1:])
        codes = codec.nearest((rows - offset) / scale, bits, levels)
        scale, offset = _least_squares(rows, codec.levels_of(codes, levels), scale)
        return scale[:, 0], offset[:, 0]

    # Errors of all ranges are in one place, since a program of several takes long to compile.
    def better(k: Any, best: Best) -> Best:
        scale, offset = map(codec.half_of, lax.cond(k < _SHARES, shrunk, fit, k, best))
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

    # A row whose whole range is out of that of float16 stays so, for the error message.
    fits = jnp.isfinite(first[0]) & jnp.isfinite(first[1])
    best = jnp.where(fits, jnp.inf, -jnp.inf).astype(jnp.float32), *first
    _, scale, offset = lax.fori_loop(0, _SHARES + _STEPS, better, best)
    return scale, offset


def _errors(
    rows: jax.Array, scale: jax.Array, offset: jax.Array, bits: Any, levels: jax.Array | None
) -> jax.Array:
    """The squared errors of rows, ``[n]``."""
    at = codec.scaled(rows, scale, offset)
    if levels is None:
        away = (at - jnp.clip(jnp.rint(at), 0, codec.highest(bits))) ** 2
    else:
        away = jnp.min((at[..., None] - levels[None, None]) ** 2, axis=-1)
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
