"""Meshes with explicit axes: the ops run in automatic mode, with an explicit output sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._ids.batch import Batch

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


def over_explicit_axes(call: Callable[[Inputs], Result], inputs: Inputs, specs: Any) -> Result:
    """``call(inputs)``, in automatic mode if an input has an explicit sharding.

    JAX cannot infer the sharding of a gather if both the table and the ids have an explicit one.

    Args:
        call: a function of arrays.
        inputs: its argument, a tree of arrays.
        specs: partition specs of the results, or a function that returns them.
    """
    mesh = explicit_mesh(inputs)
    if mesh is None:
        return call(inputs)
    out = jax.tree.map(
        lambda p: NamedSharding(mesh, p),
        specs() if callable(specs) else specs,
        is_leaf=lambda p: isinstance(p, P),
    )
    automatic: Any = jax.sharding.auto_axes(call, out_sharding=out)
    return automatic(inputs)


def spec_of(array: jax.Array) -> Any:
    """The partition spec of an array; that of a replicated one outside of explicit meshes."""
    return getattr(jax.typeof(array).sharding, "spec", P())


def like_segments(batch: Batch, ndim: int = 3) -> P:
    """The partition spec of arrays whose first axis is sharded like the segments of a batch."""
    return _first_axis(batch.ids, ndim)


def _first_axis(array: jax.Array, ndim: int) -> P:
    spec = spec_of(array)
    return P(spec[0] if len(spec) else None, *[None] * (ndim - 1))


def in_one_sharding(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays with first axes of one size, all sharded there as the first of them that is; as they are elsewhere."""
    mesh = explicit_mesh(arrays)
    if mesh is None:
        return list(arrays)
    first = max((_first_axis(array, 1) for array in arrays), key=any)
    return [
        jax.sharding.reshard(array, NamedSharding(mesh, P(*first, *[None] * (array.ndim - 1))))
        for array in arrays
    ]


def reshape_rows(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``array.reshape(shape)`` that keeps an explicit sharding of the first dimension."""
    mesh = explicit_mesh(array)
    if mesh is None:
        return array.reshape(shape)
    out = NamedSharding(mesh, _first_axis(array, len(shape)))
    return jax.lax.reshape(array, shape, out_sharding=out)


def reshape_like(array: jax.Array, other: jax.Array) -> jax.Array:
    """``array.reshape(other.shape)``, with the explicit sharding of the other array if it has one."""
    reshaped = array.reshape(other.shape)
    mesh = explicit_mesh(other)
    if mesh is None:
        return reshaped
    if not isinstance(other, Tracer):  # there may be no context with the mesh
        return jax.device_put(reshaped, other.sharding)
    return jax.sharding.reshard(reshaped, NamedSharding(mesh, spec_of(other)))


def explicit_mesh(inputs: Any) -> Any:
    """The mesh of the first input with an explicit sharding, or None."""
    for leaf in jax.tree.leaves(inputs):
        kind: Any = getattr(jax.typeof(leaf), "sharding", None)
        if kind is not None and AxisType.Explicit in kind.mesh.axis_types:
            return kind.mesh
    return None
