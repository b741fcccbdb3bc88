"""Rows of bytes: numbers of a few bits, and the scale and offset of their row.

A row of D numbers with b bits each is 4 + ceil(b D / 8) bytes: scale and offset in float16, little endian, then the
numbers, lowest bits first. Number q stands for ``scale * levels[q] + offset``. Levels are uniform, 0, 1, 2 and so on,
unless a table has others. With uniform levels, for 2, 4 and 8 bits, this is also the layout of FBGEMM's inference
operators.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._kinds.quantized.levels import Levels

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


def decoded(packed: jax.Array, features: int, bits: int, levels: Levels = None) -> jax.Array:
    """Float32 rows ``[..., D]`` of packed rows, in bytes or in words."""
    packed = as_bytes(packed)
    scale, offset = header(packed)
    codes = unpacked(packed[..., HEADER:], features, bits)
    return scale[..., None] * levels_of(codes, levels) + offset[..., None]


def levels_of(codes: jax.Array, levels: Levels | jax.Array) -> jax.Array:
    """What numbers stand for before scale and offset, in float32."""
    if levels is None:
        return codes.astype(jnp.float32)
    return jnp.asarray(levels, jnp.float32)[codes]


def header(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales and offsets of packed rows, float32 ``[...]``."""
    pairs = packed[..., :HEADER].reshape(*packed.shape[:-1], 2, 2)
    halves = lax.bitcast_convert_type(pairs, jnp.float16).astype(jnp.float32)
    return halves[..., 0], halves[..., 1]


def encoded(rows: jax.Array, bits: int, levels: Levels | jax.Array = None) -> jax.Array:
    """Packed rows uint8 ``[..., W]`` of rows ``[..., D]``, each number rounded to the nearest level.

    A row with values that are not finite, or beyond the range of float16, has a scale or offset that is not finite.
    """
    rows = rows.astype(jnp.float32)
    scale, offset = spanning(rows, bits)
    return joined(scale, offset, nearest(scaled(rows, scale, offset), bits, levels), bits)


def nearest(at: jax.Array, bits: int, levels: Levels | jax.Array) -> jax.Array:
    """The numbers uint8 whose levels are nearest to these, which are in units of the scale."""
    if levels is None:
        return jnp.clip(jnp.rint(at), 0, highest(bits)).astype(jnp.uint8)
    if isinstance(levels, jax.Array):  # a chain of comparisons would take long to compile
        middles = (levels[:-1] + levels[1:]) / 2
        above = at[..., None] > jnp.expand_dims(middles, tuple(range(at.ndim)))
        return jnp.sum(above, axis=-1, dtype=jnp.uint8)
    middles = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
    return _counted(at > middle for middle in middles).astype(jnp.uint8)


def _counted(conditions: Iterable[jax.Array]) -> jax.Array:
    """How many of these hold, int32; they are few enough to be added one by one."""
    return functools.reduce(jnp.add, (one.astype(jnp.int32) for one in conditions))


def encoded_stochastically(
    rows: jax.Array, bits: int, keys: jax.Array, levels: Levels = None
) -> jax.Array:
    """`encoded` with a key ``[n]`` for each of the rows ``[n, D]``.

    Every number is rounded to one of the two levels around it, with probabilities that make the mean exact.
    """
    rows = rows.astype(jnp.float32)
    scale, offset = covering(rows, bits)
    at = scaled(rows, scale, offset)
    if levels is not None:
        at = _in_steps(at, levels)
    random = jax.vmap(lambda key: jax.random.uniform(key, rows.shape[1:], jnp.float32))(keys)
    codes = jnp.clip(jnp.floor(at + random), 0, highest(bits)).astype(jnp.uint8)
    return joined(scale, offset, codes, bits)


def _in_steps(at: jax.Array, levels: tuple[float, ...]) -> jax.Array:
    """The number whose level is below, and the share of the way to the next level."""
    values = jnp.asarray(levels, jnp.float32)
    below = _counted(at >= level for level in levels[1:-1])
    return below.astype(jnp.float32) + (at - values[below]) / (values[below + 1] - values[below])


def covering(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Scale and offset of rows, float16 ``[...]``, such that no number is outside of the levels."""
    low, high = jnp.min(rows, axis=-1), jnp.max(rows, axis=-1)
    offset = _rounded_half(low, -jnp.inf)
    scale = _rounded_half(_step(high - offset.astype(jnp.float32), bits), jnp.inf)
    return jnp.where(scale == 0, jnp.ones_like(scale), scale), offset


def half_of(values: jax.Array) -> jax.Array:
    """Float32 values rounded to float16.

    On a GPU, XLA leaves out a conversion to float16 and back, after which numbers would be counted in units of another
    scale than the stored one. It keeps a rounding ahead of the conversion.
    """
    # A reduced precision has no subnormal numbers.
    subnormal = jnp.round(values * 2.0**24) * 2.0**-24
    rounded = jnp.where(jnp.abs(values) < 2.0**-14, subnormal, lax.reduce_precision(values, 5, 10))
    return rounded.astype(jnp.float16)


def _rounded_half(values: jax.Array, toward: Any) -> jax.Array:
    """Float16 values rounded toward an infinity."""
    half = half_of(values)
    beyond = jnp.nextafter(half, jnp.full_like(half, toward))
    wide = half.astype(jnp.float32)
    return jnp.where(wide > values if toward < 0 else wide < values, beyond, half)


def spanning(rows: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Scale and offset of rows, float16 ``[...]``: the lowest level is the minimum, the highest about the maximum."""
    offset = half_of(jnp.min(rows, axis=-1))
    spread = jnp.max(rows, axis=-1) - offset.astype(jnp.float32)
    step = _step(spread, bits)
    scale = half_of(step)
    wide = scale.astype(jnp.float32)
    # Scales below the normal numbers of float16 have few digits, and the highest level may be far below the maximum.
    short = spread - highest(bits) * wide > wide / 2
    scale = jnp.where(short, _rounded_half(step, jnp.inf), scale)
    # Rows that are constant have all numbers 0.
    return jnp.where(scale == 0, jnp.ones_like(scale), scale), offset


def _step(spread: jax.Array, bits: int) -> jax.Array:
    """The distance of the levels of rows with this spread, correctly rounded."""
    # XLA divides by a scalar by multiplying by its reciprocal, which rounds twice.
    return spread / lax.optimization_barrier(jnp.full_like(spread, highest(bits)))


def scaled(rows: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """Rows in units of the scale, from the offset on."""
    wide = offset.astype(jnp.float32)[..., None]
    return (rows - wide) * (1 / scale.astype(jnp.float32))[..., None]


def joined(scale: jax.Array, offset: jax.Array, codes: jax.Array, bits: int) -> jax.Array:
    """Packed rows from their scales and offsets in float16, and their numbers uint8 ``[..., D]``."""
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


def packed_on_host(codes: np.ndarray, bits: int) -> np.ndarray:
    """`packed_codes` of numpy, ``[n, D]``."""
    if bits == 8:
        return codes
    each = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    return np.packbits(each.reshape(len(codes), -1), axis=1, bitorder="little")


def unpacked(parts: jax.Array, features: int, bits: int) -> jax.Array:
    """The inverse of `packed_codes`; bytes beyond the last number are ignored."""
    if bits == 8:
        return parts[..., :features]
    parts = parts[..., : -(-features * bits // 8)]
    groups = _in_groups(parts, bits).astype(jnp.uint32)
    words = jnp.sum(groups << _shifts(groups, 8), axis=-1, dtype=jnp.uint32)
    codes = _at_shifts(words, _GROUP, bits) & jnp.uint32(highest(bits))
    return _flat(codes.astype(jnp.uint8))[..., :features]


def unpacked_on_host(parts: np.ndarray, features: int, bits: int) -> np.ndarray:
    """`unpacked` of numpy, ``[n, W]``."""
    if bits == 8:
        return parts[:, :features]
    each = np.unpackbits(parts, axis=1, count=features * bits, bitorder="little")
    return np.packbits(each.reshape(len(parts), features, bits), axis=2, bitorder="little")[..., 0]


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


def check_headers(
    argument: str, packed: np.ndarray, start: int, rows: np.ndarray | None = None
) -> None:
    """Raises if a scale or an offset of packed rows uint8 ``[n, W]``, or what they were made of, is not finite.

    The error begins with ``argument`` and counts rows from ``start``; ``rows`` are what they were made of, if known.
    """
    headers = np.ascontiguousarray(packed[:, :HEADER]).view("<f2")
    bad = ~np.isfinite(headers).all(axis=1)
    if rows is not None:  # XLA's minima and maxima of many rows may pass over NaN
        bad |= ~np.isfinite(rows).all(axis=1)
    if not bad.any():
        return
    first = int(np.argmax(bad))
    where = f"{argument}: row {start + first}"
    if rows is None:
        scale, offset = headers[first].tolist()
        raise ValueError(
            f"{where} has the scale {scale} and the offset {offset}; expected finite numbers. The rows may have "
            "another layout, or another number of bits or features."
        )
    if not np.isfinite(rows[first]).all():
        raise ValueError(f"{where} holds NaN or infinity; expected finite numbers.")
    raise ValueError(
        f"{where} has values from {rows[first].min()} to {rows[first].max()}; expected a range whose minimum and step "
        "are within +-65504, since scale and offset are stored in float16. Divide the rows by a constant."
    )
