"""What the fused ops share: from their keyword arguments to a call of `fused_sum`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._arguments import as_scalar
from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch
from jax_tt._ops._explicit import pooled_over_explicit_axes
from jax_tt._ops._fused_sum import Fused, fused_sum
from jax_tt._ops._reverse_only import reverse_only
from jax_tt._ops._spec import Spec
from jax_tt._ops._table import FusedTable
from jax_tt._ops._vma import vary_over, varying_axes
from jax_tt._ops._warn import warn_out_of_range
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
    call, arrays, batch = prepare(
        spec,
        table,
        batch,
        optimizer,
        method=method,
        axis_name=axis_name,
        grad_scale=grad_scale,
        skip_nonfinite=skip_nonfinite,
        stochastic_rounding=stochastic_rounding,
        key=key,
    )

    if call.method == "reference":
        warn_out_of_range(spec, batch)

    def pooled(inputs: tuple[FusedTable, Batch, dict[str, jax.Array]]) -> jax.Array:
        table, batch, arrays = inputs
        table, weights = reverse_only((table, batch.weights))
        return fused_sum(call, table, weights, dataclasses.replace(batch, weights=None), arrays)

    return pooled_over_explicit_axes(pooled, (table, batch, arrays), batch)


def prepare(
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
) -> tuple[Fused, dict[str, jax.Array], Batch]:
    """The static part of a fused call, the numbers of its update, and the batch as the call takes it."""
    storage = table.cores[0].dtype
    stochastic = stochastic_rounding and storage.itemsize == 2
    # The step decides schedules and rounding; as a constant it gets no cotangent from them.
    step = jax.lax.stop_gradient(table.step)
    arrays = {
        "hyper": jax.lax.stop_gradient(optimizer.hyperparameters(step)),
        "inv_scale": _inverse(grad_scale),
        "seed": _seed(key, step, stochastic),
    }
    call = Fused(
        spec,
        _backend.choose(method, storage),
        optimizer.native_kind,
        bool(skip_nonfinite),
        stochastic,
        axis_name,
    )
    return call, arrays, vary_over(batch, varying_axes(batch))


def _inverse(grad_scale: Any) -> jax.Array:
    if grad_scale is None:
        return jnp.ones((), jnp.float32)
    scale = as_scalar("grad_scale", grad_scale)
    return 1 / jax.lax.stop_gradient(jnp.asarray(scale, jnp.float32))


def _seed(key: jax.Array | None, step: jax.Array, stochastic: bool) -> jax.Array:
    """Two words that depend on the key and the step alone; zeros where nothing is rounded by them."""
    if key is None:
        key = jax.random.key(0, impl="threefry2x32")
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or key.shape != ():
        got = getattr(key, "dtype", type(key).__name__)
        raise TypeError(f"key: got {got}; expected one typed key, jax.random.key(seed).")
    if not stochastic:
        return jnp.zeros(2, jnp.uint32)
    return jax.random.bits(jax.random.fold_in(key, step.astype(jnp.uint32)), (2,), jnp.uint32)
