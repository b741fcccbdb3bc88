"""The pooled sum behind every differentiable op, and its derivative.

The reference is plain JAX and differentiates itself, to any order. The native path is a `custom_vjp`
that computes only the cotangents asked for. With ``out[b] = sum_j w_j row(i_j)`` over the positions j of bag b,

    d core  = sum_j w_j (d row(i_j) / d core) . g[b(j)]      d w_j = row(i_j) . g[b(j)]
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt import _reference
from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch, of_positions, present
from jax_tt._ops._explicit import pooled_over_explicit_axes
from jax_tt._ops._inputs import one_bag_per_position
from jax_tt._ops._reverse_only import first_order, reverse_only
from jax_tt._ops._spec import Spec
from jax_tt._ops._vma import sum_gradients, vary_over, varying_axes
from jax_tt._ops._warn import warn_out_of_range

Cores = tuple[jax.Array, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which cotangents are asked for; static, so that it can travel among the residuals."""

    cores: bool
    weights: bool


def pooled_sum(spec: Spec, cores: Cores, batch: Batch, method: str, axis_name: Any) -> jax.Array:
    """Weighted sums ``[S, nb, D]`` in the accumulator type, differentiable in cores and weights."""
    method = _backend.choose(method, cores[0].dtype)
    if method == "reference":
        warn_out_of_range(spec, batch)
    axes = varying_axes(cores, batch)
    if axes:
        # Replicated cores beside a sharded batch: the transpose of the marking sums their gradients.
        cores, batch = vary_over((cores, batch), axes)
    elif axis_name is not None:
        cores = sum_gradients(cores, axis_name)

    def pooled(inputs: tuple[Cores, Batch]) -> jax.Array:
        cores, batch = inputs
        if method == "reference":
            return _reference.forward(spec, cores, batch)[0]
        cores, weights = reverse_only((cores, batch.weights))
        return _native_sum((spec, method), cores, weights, dataclasses.replace(batch, weights=None))

    return pooled_over_explicit_axes(pooled, (cores, batch), batch)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _native_sum(static: tuple[Spec, str], cores: Cores, weights: Any, batch: Batch) -> jax.Array:
    spec, method = static
    return _backend.forward(
        spec, cores, dataclasses.replace(batch, weights=weights), method, False
    )[0]


def _native_sum_fwd(
    static: tuple[Spec, str], cores: Any, weights: Any, batch: Any
) -> tuple[Any, Any]:
    spec, method = static
    wanted = Wanted(perturbed(cores), perturbed(weights))
    cores, weights, batch = values((cores, weights, batch))
    batch = dataclasses.replace(batch, weights=weights)

    def forward(cores: Cores, batch: Batch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return _backend.forward(spec, cores, batch, method, wanted.cores)

    out, residuals = first_order(forward, cores, batch)
    return out, (cores, batch, residuals, wanted)


def _native_sum_bwd(static: tuple[Spec, str], saved: Any, g: Any) -> tuple[Any, Any, None]:
    return first_order(partial(_native_cotangents, static), saved, instantiate(g))


def _native_cotangents(static: tuple[Spec, str], saved: Any, g: jax.Array) -> tuple[Any, Any, None]:
    spec, method = static
    cores, batch, residuals, wanted = saved
    if not wanted.cores:
        dweights = weights_gradient(spec, cores, batch, g, method) if wanted.weights else None
        return None, dweights, None
    dcores, dweights = _backend.backward(spec, cores, batch, residuals, g, method, wanted.weights)
    dcores = tuple(grad.astype(core.dtype) for grad, core in zip(dcores, cores, strict=True))
    return dcores, dweights, None


_native_sum.defvjp(_native_sum_fwd, _native_sum_bwd, symbolic_zeros=True)


def weights_gradient(
    spec: Spec, cores: Cores, batch: Batch, g: jax.Array, method: str
) -> jax.Array:
    """``row(i_j) . g[b(j)]`` for every position, with no gradient of the cores computed beside it."""
    rows, _ = _backend.forward(spec, cores, one_bag_per_position(batch), method, False)
    rows = rows.reshape(batch.num_segments, batch.capacity, rows.shape[-1])
    of_bag = of_positions(batch, g) if batch.num_bags else jnp.zeros_like(rows)
    return jnp.where(present(batch), jnp.sum(rows * of_bag, axis=-1), 0).astype(batch.weights.dtype)


def perturbed(tree: Any) -> bool:
    """Whether a gradient is asked for with respect to any leaf of a symbolic-zeros argument."""
    return any(leaf.perturbed for leaf in _primals(tree))


def values(tree: Any) -> Any:
    """The plain values of a symbolic-zeros argument."""
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=_is_primal)


def instantiate(g: Any) -> jax.Array:
    """An output cotangent as an array, also where it is known to be zero."""
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        aval: Any = g.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return g


def _primals(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_primal)


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)
