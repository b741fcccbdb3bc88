"""Divisors that turn a bag's weighted sum into a mean or a ``sqrtn``."""

import jax
import jax.numpy as jnp

from jax_tt._ops._batch import Batch, pool, present
from jax_tt._ops._explicit import pooled_over_explicit_axes


def combine(combiner: str, batch: Batch, sums: jax.Array) -> jax.Array:
    """Divides weighted sums ``[S, nb, D]`` as the combiner asks; a zero divisor gives 0."""
    # Of nothing `where` makes a constant, and a fused table behind it would get zeros for its new value.
    if combiner == "sum" or not sums.size:
        return sums

    def divided(inputs: tuple[Batch, jax.Array]) -> jax.Array:
        return _divided(combiner, *inputs)

    return pooled_over_explicit_axes(divided, (batch, sums), batch)


def _divided(combiner: str, batch: Batch, sums: jax.Array) -> jax.Array:
    here = present(batch)
    if batch.weights is None:
        size = pool(batch, here.astype(sums.dtype))
    else:
        weights = jnp.where(here, batch.weights, 0).astype(sums.dtype)
        size = pool(batch, weights if combiner == "mean" else weights * weights)
    empty = size == 0
    # The inner `where` keeps 1/0 and the infinite slope of sqrt(0) out of the gradient.
    safe = jnp.where(empty, 1, size)
    divisor = safe if combiner == "mean" else jnp.sqrt(safe)
    return jnp.where(empty[..., None], 0, sums / divisor[..., None])
