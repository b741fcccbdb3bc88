"""Mesh axes that values vary over inside a ``shard_map`` with ``check_vma=True``, and sums over all shards."""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

Tree = TypeVar("Tree")
_NONE: frozenset[Any] = frozenset()


def varying_axes(*trees: Any) -> frozenset[Any]:
    """Axes that any leaf varies over; empty outside a ``shard_map``."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return _NONE
    return frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(trees)))


def _axes(leaf: Any) -> frozenset[Any]:
    kind = jax.typeof(leaf)
    # Newer JAX versions keep the axes in `manual_axis_type`, older ones in `vma`.
    manual = getattr(kind, "manual_axis_type", None)
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def vary_over(tree: Tree, axes: frozenset[Any]) -> Tree:
    """Marks every leaf as varying over ``axes``; the transpose sums its gradient over the new ones."""
    if not axes:
        return tree

    def mark(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _axes(leaf), key=str))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def all_shards(shard: jax.Array, axes: Any) -> jax.Array:
    """All shards along the leading axis.

    Computed as a psum: JAX knows its result to be replicated, unlike that of `jax.lax.all_gather`, and the update of a
    replicated table must be replicated.
    """
    size = shard.shape[0]
    whole = jnp.zeros((size * lax.axis_size(axes), *shard.shape[1:]), shard.dtype)
    start = lax.axis_index(axes) * size
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, shard, start, 0), axes)


def own_shard(whole: jax.Array, size: int, axes: Any) -> jax.Array:
    """The part of this device of an array of `all_shards`, ``size`` along the leading axis."""
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axes) * size, size)


def on_all_devices(flags: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Whether flags are true on all devices along ``axes``, which then agree."""
    return lax.pmin(flags.astype(jnp.int32), axes) > 0


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


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_gradients(tree: Any, axis_name: Any) -> Any:
    """Identity whose gradient is summed over ``axis_name``."""
    del axis_name
    return tree


def _sum_fwd(tree: Any, axis_name: Any) -> tuple[Any, None]:
    del axis_name
    return tree, None


def _sum_bwd(axis_name: Any, _: None, g: Any) -> tuple[Any]:
    return (lax.psum(g, axis_name),)


sum_gradients.defvjp(_sum_fwd, _sum_bwd)


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
