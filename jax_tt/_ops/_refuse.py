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
def once(operands: Any, witness: jax.Array) -> Any:
    """Identity on ``operands`` that raises under ``vmap`` and under differentiation.

    Args:
        operands: the batch and the output cotangent of the update.
        witness: a small leaf of the table, which has a mapped axis where the table has one.
    """
    return _unmapped(operands, witness)


@once.defjvp
def _once_jvp(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise TypeError(_TWICE)


@jax.custom_batching.custom_vmap
def _unmapped(operands: Any, witness: jax.Array) -> Any:
    del witness
    return operands


@_unmapped.def_vmap
def _unmapped_rule(axis_size: int, in_batched: Any, operands: Any, witness: jax.Array) -> Any:
    del axis_size, in_batched, operands, witness
    raise ValueError(_VMAP)
