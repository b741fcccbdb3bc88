"""Meshes with explicit axes: the ops run in automatic mode, with an explicit output sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._ids.batch import Batch

Inputs = TypeVar("Inputs")
Result = TypeVar("Result")


def pooled_over_explicit_axes(
    call: Callable[[Inputs], jax.Array], inputs: Inputs, batch: Batch
) -> jax.Array:
    """``call(inputs)``, sums ``[S, nb, D]`` that are sharded like the segments of the batch."""
    return over_explicit_axes(call, inputs, batch, _like_segments)


def sums_over_explicit_axes(
    call: Callable[[Inputs], tuple[jax.Array, ...]], inputs: Inputs, batches: Sequence[Batch]
) -> tuple[jax.Array, ...]:
    """`pooled_over_explicit_axes` for the sums of several batches."""
    return _automatic(call, inputs, lambda: tuple(_like_segments(_axis(b)) for b in batches))


def lists_over_explicit_axes(
    call: Callable[[Inputs], list[jax.Array]], inputs: Inputs, batches: Sequence[Batch]
) -> list[jax.Array]:
    """``call(inputs)``, one array ``[S, cap]`` per batch, which is sharded like the segments of the batch."""
    return _automatic(call, inputs, lambda: [P(_axis(batch), None) for batch in batches])


def over_explicit_axes(
    call: Callable[[Inputs], Result], inputs: Inputs, batch: Batch, specs: Callable[[Any], Any]
) -> Result:
    """``call(inputs)`` with results sharded as ``specs(axis)``, where ``axis`` is that of the segments of the batch.

    JAX cannot infer the sharding of a gather if both the table and the ids have an explicit one, so the call is made
    in automatic mode.
    """
    return _automatic(call, inputs, lambda: specs(_axis(batch)))


def replicated_over_explicit_axes(call: Callable[[Inputs], Result], inputs: Inputs) -> Result:
    """``call(inputs)`` with results that every device has all of."""
    return _automatic(call, inputs, P)


def sharded_over_explicit_axes(
    call: Callable[[Inputs], Result], inputs: Inputs, axis: Any
) -> Result:
    """``call(inputs)`` with results whose first axis is divided over mesh axes."""
    return _automatic(call, inputs, lambda: P(axis))


def specified_over_explicit_axes(
    call: Callable[[Inputs], Result], inputs: Inputs, specs: Any
) -> Result:
    """``call(inputs)`` with results sharded as ``specs``, a tree of the same structure."""
    return _automatic(call, inputs, lambda: specs)


def _automatic(
    call: Callable[[Inputs], Result], inputs: Inputs, specs: Callable[[], Any]
) -> Result:
    mesh = explicit_mesh(inputs)
    if mesh is None:
        return call(inputs)
    out = jax.tree.map(
        lambda p: NamedSharding(mesh, p), specs(), is_leaf=lambda p: isinstance(p, P)
    )
    automatic: Any = jax.sharding.auto_axes(call, out_sharding=out)
    return automatic(inputs)


def _axis(batch: Batch) -> Any:
    """The mesh axis that the segments of a batch are sharded over."""
    spec: Any = getattr(jax.typeof(batch.ids).sharding, "spec", P())
    return spec[0] if len(spec) else None


def _like_segments(axis: Any) -> P:
    return P(axis, None, None)


def like_explicit(
    call: Callable[[Inputs], jax.Array], inputs: Inputs, like: jax.Array
) -> jax.Array:
    """``call(inputs)``, whose result has the shape and the sharding of ``like``."""
    mesh = explicit_mesh(inputs)
    if mesh is None:
        return call(inputs)
    spec: Any = getattr(jax.typeof(like).sharding, "spec", P())
    automatic: Any = jax.sharding.auto_axes(call, out_sharding=NamedSharding(mesh, spec))
    return automatic(inputs)


def reshape_rows(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``array.reshape(shape)`` that keeps an explicit sharding of the first dimension."""
    kind: Any = getattr(jax.typeof(array), "sharding", None)
    if kind is None or AxisType.Explicit not in kind.mesh.axis_types:
        return array.reshape(shape)
    first = kind.spec[0] if len(kind.spec) else None
    out = NamedSharding(kind.mesh, P(first, *[None] * (len(shape) - 1)))
    return jax.lax.reshape(array, shape, out_sharding=out)


def explicit_mesh(inputs: Any) -> Any:
    """The mesh of the first input with an explicit sharding, or None."""
    for leaf in jax.tree.leaves(inputs):
        kind: Any = getattr(jax.typeof(leaf), "sharding", None)
        if kind is not None and AxisType.Explicit in kind.mesh.axis_types:
            return kind.mesh
    return None
