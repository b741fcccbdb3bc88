"""The arrays of an update: hyper-parameters, the inverse loss scale, and the seed of stochastic rounding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._arguments import as_scalar
from jax_tt._tables.options import StepInputs, Update


def step_values(
    update: Update, step: jax.Array, storage: Any, inputs: StepInputs
) -> dict[str, jax.Array]:
    """``hyper[H]``, ``inv_scale`` and ``seed[2]`` of the update at ``step``, for parameters of type ``storage``."""
    # Schedules and rounding depend on the step, but must not give it a cotangent.
    step = jax.lax.stop_gradient(step)
    rule = update.optimizer
    if inputs.hyperparameters:
        rule = rule.with_hyperparameters(inputs.hyperparameters)
    inverse = jnp.ones((), jnp.float32)
    if inputs.grad_scale is not None:
        scale = jnp.asarray(as_scalar("grad_scale", inputs.grad_scale), jnp.float32)
        inverse = 1 / jax.lax.stop_gradient(scale)
    return {
        "hyper": jax.lax.stop_gradient(rule.hyperparameters(step)),
        "inv_scale": inverse,
        "seed": _seed(inputs.key, step, update.rounds_stochastically(storage)),
    }


def _seed(key: jax.Array | None, step: jax.Array, stochastic: bool) -> jax.Array:
    """Two words that depend only on the key and the step; zeros without stochastic rounding."""
    if key is None:
        key = jax.random.key(0, impl="threefry2x32")
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or key.shape != ():
        got = getattr(key, "dtype", type(key).__name__)
        raise TypeError(f"key: got {got}; expected one typed key, jax.random.key(seed).")
    if not stochastic:
        return jnp.zeros(2, jnp.uint32)
    return jax.random.bits(jax.random.fold_in(key, step.astype(jnp.uint32)), (2,), jnp.uint32)
