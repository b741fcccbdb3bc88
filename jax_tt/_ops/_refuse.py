"""Refuses transformations under which a fused update would be wrong."""

from typing import Any

import jax

_VMAP = (
    "A fused op was differentiated under jax.vmap. Its cotangent is the new table, and JAX would add one per "
    "mapped example. Put all examples into one call (Bags, or ids [B, L]) outside vmap, or use the op without "
    "'fused' and optax."
)
_TWICE = (
    "The backward pass of a fused op was itself differentiated (jvp, hessian, grad of grad). It returns new "
    "parameters, not gradients, so higher derivatives do not exist. Use the op without 'fused', with "
    "method='reference'."
)


@jax.custom_jvp
def once(g: jax.Array) -> jax.Array:
    """Identity on the output cotangent that raises under ``vmap`` and under differentiation."""
    return _unmapped(g)


@once.defjvp
def _once_jvp(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise TypeError(_TWICE)


@jax.custom_batching.custom_vmap
def _unmapped(g: jax.Array) -> jax.Array:
    return g


@_unmapped.def_vmap
def _unmapped_rule(axis_size: int, in_batched: Any, g: jax.Array) -> Any:
    del axis_size, in_batched, g
    raise ValueError(_VMAP)
