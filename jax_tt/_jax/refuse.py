"""Raises under `jax.vmap` if a fused update would be wrong there."""

from typing import Any

import jax

_VMAP = (
    "A fused op was differentiated under jax.vmap. Its cotangent is the new table, and JAX would add one per "
    "mapped example. Put all examples into one call (Bags, or ids [B, L]) outside vmap, or use the op without "
    "'fused' and optax."
)


@jax.custom_batching.custom_vmap
def once(operands: Any, witness: jax.Array) -> Any:
    """Identity on ``operands`` that raises under ``vmap``.

    Args:
        operands: the batch and the output cotangent of the update.
        witness: a small leaf of the table, which is mapped if the table is.
    """
    del witness
    return operands


@once.def_vmap
def _once_rule(axis_size: int, in_batched: Any, operands: Any, witness: jax.Array) -> Any:
    del axis_size, in_batched, operands, witness
    raise ValueError(_VMAP)
