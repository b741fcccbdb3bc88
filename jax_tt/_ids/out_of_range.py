"""Counts ids out of range."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import IdSpace, outside
from jax_tt._jax.examples import axes_to_count, summed_like

_MOST = 2**31 - 1


@partial(jax.jit, static_argnums=(2, 3), inline=True)
def add_out_of_range(total: jax.Array, batch: Batch, space: IdSpace, axis_name: Any) -> jax.Array:
    """``total`` plus the number of ids out of range, at most the largest int32; the same on all devices.

    Args:
        total: int32 scalar. Under ``vmap``, the ids of all examples are added to it unless it is mapped itself.
        batch: ids of the table.
        space: the ids that are in range.
        axis_name: mesh axes that the ids are sharded over, if JAX does not track them.
    """
    total = total.astype(jnp.int32)  # averaging models makes the count a float
    count = summed_like(total, outside(space, batch))
    axes = axes_to_count(total, count, axis_name)
    if axes:
        count = lax.psum(count, axes)
    return total + jnp.minimum(count, _MOST - total)
