"""Chooses between the reference and the native implementation of the pooled sum."""

from typing import Any

import jax

from jax_tt import _reference
from jax_tt._method import resolve_method
from jax_tt._ops._batch import Batch
from jax_tt._ops._spec import Spec


def pooled_sum(
    spec: Spec, cores: tuple[jax.Array, ...], batch: Batch, method: str, axis_name: Any
) -> jax.Array:
    """Weighted sums ``[S, nb, D]`` in the accumulator type, differentiable in cores and weights."""
    resolve_method(method)
    return _reference.forward(spec, cores, batch)[0]
