"""Packed codes: m numbers of b bits each in ``ceil(m b / 8)`` bytes a row, lowest bits first."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MAX_BITS = 16


def row_bytes(num_codes: int, bits: int) -> int:
    """Bytes of the codes of a row."""
    return -(-num_codes * bits // 8)


def packed(codes: jax.Array, bits: int) -> jax.Array:
    """Packed rows uint8 ``[..., W]`` of codes ``[..., m]``, integers below ``2 ** bits``."""
    places, shifts, reach = _places(codes.shape[-1], bits)
    words = codes.astype(jnp.uint32) << jnp.broadcast_to(shifts, codes.shape)
    width = row_bytes(codes.shape[-1], bits)
    # Codes share bytes, but no bits.
    row = jnp.zeros((*codes.shape[:-1], width + reach), jnp.uint32)
    for k in range(reach):
        row = row.at[..., places + k].add(words >> (8 * k) & 255)
    return row[..., :width].astype(jnp.uint8)


def packed_on_host(codes: np.ndarray, bits: int) -> np.ndarray:
    """`packed` of ``[n, m]`` without a program for every number of codes and of bits."""
    parts = codes.astype(np.uint16)[..., None] >> np.arange(bits, dtype=np.uint16) & 1
    return np.packbits(
        parts.reshape(len(codes), codes.shape[1] * bits).astype(bool), axis=1, bitorder="little"
    )


def unpacked(rows: jax.Array, num_codes: int, bits: int) -> jax.Array:
    """The inverse of `packed`: codes int32 ``[..., m]``; bits beyond the last code are ignored."""
    places, shifts, reach = _places(num_codes, bits)
    # Beyond the last byte there is nothing that a code needs.
    parts = [
        rows[..., np.minimum(places + k, rows.shape[-1] - 1)].astype(jnp.uint32) << (8 * k)
        for k in range(reach)
    ]
    words = sum(parts[1:], parts[0])
    codes = words >> jnp.broadcast_to(shifts, words.shape) & jnp.uint32((1 << bits) - 1)
    return codes.astype(jnp.int32)


def unpacked_on_host(rows: np.ndarray, num_codes: int, bits: int) -> np.ndarray:
    """`unpacked` of ``[n, W]`` without a program for every number of codes and of bits."""
    each = np.unpackbits(rows, axis=1, count=num_codes * bits, bitorder="little")
    each = each.reshape(len(rows), num_codes, bits).astype(np.int32)
    return each @ (1 << np.arange(bits, dtype=np.int32))


def _places(num_codes: int, bits: int) -> tuple[np.ndarray, np.ndarray, int]:
    """First byte of every code, its first bit in that byte, and the bytes that a code may reach into."""
    bit = np.arange(num_codes) * bits
    reach = -(-int(np.max(bit % 8) + bits) // 8)
    return bit // 8, (bit % 8).astype(np.uint32), reach
