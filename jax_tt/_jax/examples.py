"""Totals of what all examples of a ``vmap`` and all shards of a batch count."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from jax_tt._jax.vma import varying_axes


@custom_vmap
def summed_like(total: jax.Array, values: jax.Array) -> jax.Array:
    """The sum of ``values[*total.shape, ...]`` for each element of ``total``, in its type.

    Under ``vmap``, the values of all examples are summed unless ``total`` is mapped itself.
    """
    return jnp.sum(values, axis=tuple(range(total.ndim, values.ndim)), dtype=total.dtype)


@summed_like.def_vmap
def _summed_mapped(size: int, mapped: list[bool], total: Any, values: Any) -> tuple[Any, bool]:
    of_total, of_values = mapped
    if not of_total:  # one total for all examples
        return summed_like(total, jnp.moveaxis(values, 0, -1)), False
    every = values if of_values else jnp.broadcast_to(values, (size, *values.shape))
    return summed_like(total, every), True


def axes_to_count(total: Any, values: Any, axis_name: Any) -> Any:
    """The mesh axes whose shards of ``values`` are to be counted in ``total``; empty outside a ``shard_map``.

    Args:
        total: the totals, which are the same on all devices.
        values: what is counted.
        axis_name: mesh axes that the values are sharded over, if JAX does not track them.
    """
    axes = tuple(sorted(varying_axes(values) - varying_axes(total), key=str))
    return axis_name if not axes and axis_name is not None and _is_bound(axis_name) else axes


def _is_bound(axis_name: Any) -> bool:
    """Whether this runs inside a ``shard_map`` over these axes."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True
