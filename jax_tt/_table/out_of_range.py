"""Counts ids out of range."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ids.batch import Batch
from jax_tt._jax.examples import axes_to_count, summed_like
from jax_tt._table.ids import Sizes, outside
from jax_tt._table.table import Table

_MOST = 2**31 - 1


def add_out_of_range(total: jax.Array, batch: Batch, table: Table, axis_name: Any) -> jax.Array:
    """``total`` plus the number of ids out of range, at most the largest int32; the same on all devices.

    Args:
        total: int32 scalar. Under ``vmap``, the ids of all examples are added to it unless it is mapped itself.
        batch: ids of the table.
        table: the table that the ids refer to.
        axis_name: mesh axes that the ids are sharded over, if JAX does not track them.
    """
    return _add(Sizes(table.num_embeddings, table.radices), batch, total, axis_name)


@partial(jax.jit, static_argnums=(0, 3), inline=True)
def _add(sizes: Sizes, batch: Batch, total: jax.Array, axis_name: Any) -> jax.Array:
    total = total.astype(jnp.int32)  # averaging models makes the count a float
    count = summed_like(total, outside(sizes, batch))
    axes = axes_to_count(total, count, axis_name)
    if axes:
        count = lax.psum(count, axes)
    return total + jnp.minimum(count, _MOST - total)
