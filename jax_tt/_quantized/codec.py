"""Rows of bytes: numbers of a few bits, and the scale and offset of their row.

A row of D numbers with b bits each is 4 + ceil(b D / 8) bytes: scale and offset in float16, little endian, then the
numbers, lowest bits first. Number q stands for ``scale * q + offset``. For 2, 4 and 8 bits this is also the layout of
FBGEMM's inference operators.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BITS = (8, 4, 3, 2)
HEADER = 4  # bytes of scale and offset
WORD = 4  # bytes of a float32
_GROUP = 8  # numbers, which take a whole number of bytes


def row_bytes(features: int, bits: int) -> int:
    """Bytes of a row."""
    return HEADER + -(-features * bits // 8)


def highest(bits: int) -> int:
    """The highest number."""
    return (1 << bits) - 1


def as_bytes(packed: jax.Array) -> jax.Array:
    """Packed rows uint8 ``[..., W]``, of which float32 words ``[..., W / 4]`` may be given."""
    if packed.dtype == jnp.uint8:
        return packed
    return _flat(lax.bitcast_convert_type(packed, jnp.uint8))


def as_words(packed: jax.Array) -> jax.Array:
    """Packed rows uint8 ``[..., W]`` as float32 words ``[..., W / 4]``."""
    parts = packed.reshape(*packed.shape[:-1], packed.shape[-1] // WORD, WORD)
    return lax.bitcast_convert_type(parts, jnp.float32)


def decoded(packed: jax.Array, features: int, bits: int) -> jax.Array:
    """Float32 rows ``[..., D]`` of packed rows, in bytes or in words."""
    packed = as_bytes(packed)
    scale, offset = header(packed)
    codes = unpacked(packed[..., HEADER:], features, bits)
    return scale[..., None] * codes.astype(jnp.float32) + offset[..., None]


def header(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales and offsets of packed rows, float32 ``[...]``."""
    pairs = packed[..., :HEADER].reshape(*packed.shape[:-1], 2, 2)
    halves = lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)
    return halves[..., 0], halves[..., 1]


def encoded(rows: jax.Array, bits: int) -> jax.Array:
    """Packed rows uint8 ``[..., W]`` of rows ``[..., D]``, each number rounded to the nearest level.

    A row with values that are not finite, or beyond the range of float16, has a scale or offset that is not finite.
    """
    rows = rows.astype(jnp.float32)
    scale, offset = levels(rows, bits)
    steps = jnp.rint(scaled(rows, scale, offset))
    return joined(scale, offset, steps, bits)


def encoded_stochastically(rows: jax.Array, bits: int, keys: jax.Array) -> jax.Array:
    """`encoded` with a key ``[n]`` for each of the rows ``[n, D]``.

    Every number is rounded to one of the two levels around it, with probabilities that make the mean exact.
    """
    rows = rows.astype(jnp.float32)
    scale, offset = covering_levels(rows, bits)
    at = scaled(rows, scale, offset)
    random = jax.vmap(lambda key: jax.random.uniform(key, rows.shape[1:], jnp.float32))(keys)
    return joined(scale, offset, jnp.floor(at + random), bits)


def covering_levels(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Scale and offset of rows, float16 ``[...]``, such that no number is outside of the levels."""
    low, high = jnp.min(rows, axis=-1), jnp.max(rows, axis=-1)
    offset = _rounded_half(low, -jnp.inf)
    scale = _rounded_half((high - offset.astype(jnp.float32)) / highest(bits), jnp.inf)
    return jnp.where(scale == 0, jnp.ones_like(scale), scale), offset


def _rounded_half(values: jax.Array, toward: Any) -> jax.Array:
    """Float16 values rounded toward an infinity."""
    half = values.astype(jnp.float16)
    beyond = jnp.nextafter(half, jnp.full_like(half, toward))
    wide = half.astype(jnp.float32)
    return jnp.where(wide > values if toward < 0 else wide < values, beyond, half)


def levels(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Scale and offset of rows, float16 ``[...]``: the lowest level is the minimum, the highest about the maximum."""
    offset = jnp.min(rows, axis=-1).astype(jnp.float16)
    spread = jnp.max(rows, axis=-1) - offset.astype(jnp.float32)
    step = spread / highest(bits)
    scale = step.astype(jnp.float16)
    wide = scale.astype(jnp.float32)
    # Scales below the normal numbers of float16 have few digits, and the highest level may be far below the maximum.
    short = spread - highest(bits) * wide > wide / 2
    scale = jnp.where(short, _rounded_half(step, jnp.inf), scale)
    # Rows that are constant have all numbers 0.
    return jnp.where(scale == 0, jnp.ones_like(scale), scale), offset


def scaled(rows: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """Rows in units of the scale, from the offset on."""
    wide = offset.astype(jnp.float32)[..., None]
    return (rows - wide) * (1 / scale.astype(jnp.float32))[..., None]


def joined(scale: jax.Array, offset: jax.Array, steps: jax.Array, bits: int) -> jax.Array:
    """Packed rows from their scales, offsets and whole numbers of steps."""
    codes = jnp.clip(steps, 0, highest(bits)).astype(jnp.uint8)
    parts = lax.bitcast_convert_type(jnp.stack([scale, offset], axis=-1), jnp.uint8)
    parts = parts.reshape(*scale.shape, HEADER)
    return jnp.concatenate([parts, packed_codes(codes, bits)], axis=-1)


def packed_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Numbers uint8 ``[..., D]`` as bytes ``[..., ceil(b D / 8)]``."""
    if bits == 8:
        return codes
    features = codes.shape[-1]
    groups = _in_groups(codes, _GROUP).astype(jnp.uint32)
    words = jnp.sum(groups << _shifts(groups, bits), axis=-1, dtype=jnp.uint32)
    parts = _at_shifts(words, bits, 8).astype(jnp.uint8)
    return _flat(parts)[..., : -(-features * bits // 8)]


def unpacked(parts: jax.Array, features: int, bits: int) -> jax.Array:
    """The inverse of `packed_codes`; bytes beyond the last number are ignored."""
    if bits == 8:
        return parts[..., :features]
    parts = parts[..., : -(-features * bits // 8)]
    groups = _in_groups(parts, bits).astype(jnp.uint32)
    words = jnp.sum(groups << _shifts(groups, 8), axis=-1, dtype=jnp.uint32)
    codes = _at_shifts(words, _GROUP, bits) & jnp.uint32(highest(bits))
    return _flat(codes.astype(jnp.uint8))[..., :features]


def _in_groups(values: jax.Array, size: int) -> jax.Array:
    """The last axis in groups, the last one filled with zeros."""
    more: Any = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % size)]
    return jnp.pad(values, more).reshape(*values.shape[:-1], -(-values.shape[-1] // size), size)


def _flat(groups: jax.Array) -> jax.Array:
    """The last two axes as one."""
    *rest, count, size = groups.shape
    return groups.reshape(*rest, count * size)


def _at_shifts(words: jax.Array, count: int, step: int) -> jax.Array:
    """``words[..., None] >> [0, step, 2 step, ...]``."""
    wide = jnp.broadcast_to(words[..., None], (*words.shape, count))
    return wide >> _shifts(wide, step)


def _shifts(values: jax.Array, step: int) -> jax.Array:
    """``step`` times the place along the last axis."""
    return lax.broadcasted_iota(jnp.uint32, values.shape, values.ndim - 1) * jnp.uint32(step)
