"""Routes to rows of other devices on the native kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._native.call import native_call


def route_distinct(
    device: jax.Array, row: jax.Array, *, devices: int, platform: str
) -> tuple[jax.Array, ...]:
    """Device, row, source and places of `jax_tt._kinds.sharded.route.distinct`, int32 ``[n]``."""
    kind = jax.ShapeDtypeStruct(row.shape, jnp.int32)
    found = native_call(
        platform,
        "route_distinct",
        {"device": device, "row": row},
        dict.fromkeys(("found_device", "found_row", "source", "places"), kind),
        None,
        {"devices": np.int64(devices)},
    )
    return tuple(found.values())


def route_bags(
    device: jax.Array,
    row: jax.Array,
    bag: jax.Array,
    *,
    devices: int,
    size: int,
    bags: int,
    platform: str,
) -> tuple[jax.Array, ...]:
    """Rows and sources ``[devices, size]``, offsets ``[devices, bags + 1]`` and ``[1]``, the most rows for a device."""
    shapes = {
        "rows": (devices, size),
        "source": (devices, size),
        "offsets": (devices, bags + 1),
        "most": (1,),
    }
    found = native_call(
        platform,
        "route_bags",
        {"device": device, "row": row, "bag": bag},
        {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()},
        None,
        {"devices": np.int64(devices), "size": np.int64(size), "bags": np.int64(bags)},
    )
    return tuple(found.values())
