"""What the fused ops share: from their keyword arguments to a call of `fused_sum`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch
from jax_tt._ops._fused_sum import Fused, fused_sum
from jax_tt._ops._spec import Spec
from jax_tt._ops._table import FusedTable
from jax_tt._ops._vma import vary_over, varying_axes
from jax_tt.optimizers import Optimizer


def call_fused(
    spec: Spec,
    table: FusedTable,
    batch: Batch,
    optimizer: Optimizer,
    *,
    method: str,
    axis_name: Any,
    grad_scale: Any,
    skip_nonfinite: bool,
    stochastic_rounding: bool,
    key: jax.Array | None,
) -> jax.Array:
    """Weighted sums ``[S, nb, D]`` whose backward pass updates ``table``."""
    storage = table.cores[0].dtype
    stochastic = stochastic_rounding and storage.itemsize == 2
    # The step decides schedules and rounding; as a constant it gets no cotangent from them.
    step = jax.lax.stop_gradient(table.step)
    arrays = {
        "hyper": jax.lax.stop_gradient(optimizer.hyperparameters(step)),
        "inv_scale": _inverse(grad_scale),
        "seed": _seed(key, step) if stochastic else jnp.zeros(2, jnp.uint32),
    }
    call = Fused(
        spec,
        _backend.choose(method),
        optimizer.native_kind,
        bool(skip_nonfinite),
        stochastic,
        axis_name,
    )
    batch = vary_over(batch, varying_axes(batch))
    weights = batch.weights
    return fused_sum(call, table, weights, dataclasses.replace(batch, weights=None), arrays)


def _inverse(grad_scale: Any) -> jax.Array:
    if grad_scale is None:
        return jnp.ones((), jnp.float32)
    scale = jnp.asarray(grad_scale, jnp.float32)
    if scale.shape != ():
        raise ValueError(f"grad_scale: got shape {scale.shape}; expected a scalar loss scale.")
    return 1 / jax.lax.stop_gradient(scale)


def _seed(key: jax.Array | None, step: jax.Array) -> jax.Array:
    """Two words that depend on the key and the step alone."""
    if key is None:
        key = jax.random.key(0, impl="threefry2x32")
    elif not jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key) or key.shape != ():
        raise TypeError(
            f"key: got {jnp.asarray(key).dtype}; expected one typed key, jax.random.key(seed)."
        )
    return jax.random.bits(jax.random.fold_in(key, step.astype(jnp.uint32)), (2,), jnp.uint32)
