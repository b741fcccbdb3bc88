"""Routes to rows of other devices on the native kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._native._call import native_call


def route_distinct(
    device: jax.Array, row: jax.Array, *, devices: int, platform: str
) -> tuple[jax.Array, ...]:
    """Device, row, source and places of `jax_tt._sharding.route.distinct`, int32 ``[n]``."""
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
