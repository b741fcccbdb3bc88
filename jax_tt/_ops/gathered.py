"""Entries that several devices have, on all of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def places_of_all(here: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Places of the entries that are ``here`` among the entries of all devices, the first device first."""
    counts = jax.lax.all_gather(jnp.sum(here, dtype=jnp.int32), axes)
    before = jnp.arange(counts.size) < jax.lax.axis_index(axes)
    return jnp.sum(jnp.where(before, counts, 0)) + jnp.arange(here.size, dtype=jnp.int32)


def of_all(entries: jax.Array, places: jax.Array, size: int, axes: tuple[str, ...]) -> jax.Array:
    """Gathers entries of all devices in their places, bit for bit; 0 where no device has one."""
    kind = f"uint{8 * entries.dtype.itemsize}"
    bits = jax.lax.bitcast_convert_type(entries, kind)
    bits = jnp.zeros((size, *bits.shape[1:]), kind).at[places].add(bits, mode="drop")
    # Not every device adds shorter integers.
    wide = bits.astype(jnp.uint32) if entries.dtype.itemsize < 4 else bits
    return jax.lax.bitcast_convert_type(jax.lax.psum(wide, axes).astype(kind), entries.dtype)
