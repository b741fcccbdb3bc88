"""Pure JAX twins of the native ops: same signatures, always available, differentiable, the test oracle.

Every function takes the canonical `Batch` and works in the accumulator type (float32, or float64 for float64).
A dense table is passed as a tuple of one core ``[N, D]``.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt import _sentinel
from jax_tt._dtypes import accumulator
from jax_tt._ops._batch import Batch, pool, present
from jax_tt._ops._ids import digits_in_range
from jax_tt._ops._rounding import round_to
from jax_tt._ops._spec import IGNORED, DenseSpec, Spec
from jax_tt._ops._vma import vary_over, varying_axes
from jax_tt.optimizers import RULES

Cores = Sequence[jax.Array]


def rows(spec: Spec, cores: Cores, batch: Batch) -> jax.Array:
    """Row of every position ``[S, cap, D]``: 0 where nothing is present, bounds applied."""
    digits, ok = digits_in_range(spec, batch)
    accum = accumulator(cores[0].dtype)
    # Up-cast before the gather: its transpose then sums duplicate gradients in the accumulator type.
    slices = [
        # A table may have more rows than the type of its ids has numbers; the size would be added to negative ones.
        core.astype(accum).at[digit].get(mode="promise_in_bounds", wrap_negative_indices=False)
        for core, digit in zip(cores, digits, strict=True)
    ]
    if isinstance(spec, DenseSpec):
        value = slices[0]
    else:
        value = slices[0][:, :, 0]  # [S, cap, q_1, r_2]
        for core in slices[1:]:
            value = jnp.einsum("scar,scrbt->scabt", value, core, precision=spec.precision)
            s, c, a, b, t = value.shape
            value = value.reshape(s, c, a * b, t)
        value = value[..., 0]
    here = present(batch)
    if spec.bounds in IGNORED:
        here = here & ok
    elif spec.bounds == "error":
        value = jnp.where(ok[..., None], value, jnp.nan)
    return jnp.where(here[..., None], value, 0)


def forward(
    spec: Spec, cores: Cores, batch: Batch, save: bool = False, sentinel: jax.Array | None = None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Weighted sums of rows ``[S, nb, D]``, all NaN beside a sentinel that moved, and no residuals."""
    del save
    value = rows(spec, cores, batch)
    if batch.weights is not None:
        # A position that is not present may carry any weight, NaN included.
        weights = jnp.where(present(batch), batch.weights, 0).astype(value.dtype)
        value = value * weights[..., None]
    sums = pool(batch, value)
    return sums if sentinel is None else jnp.where(_sentinel.holds(sentinel), sums, jnp.nan), ()


def backward(
    spec: Spec,
    cores: Cores,
    batch: Batch,
    residuals: tuple[jax.Array, ...],
    g: jax.Array,
    want_weights: bool,
    axis_name: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Gradients of `forward` in the accumulator type; summed over ``axis_name`` if given."""
    del residuals
    accum = accumulator(cores[0].dtype)
    # Marked as varying, replicated cores get the gradient of this shard alone, summed below if asked.
    wide = vary_over(tuple(core.astype(accum) for core in cores), varying_axes(batch, g))

    def pooled(wide: Cores, weights: Any) -> jax.Array:
        return forward(spec, wide, dataclasses.replace(batch, weights=weights))[0]

    if want_weights:
        _, pullback = jax.vjp(pooled, wide, batch.weights)
        dcores, dweights = pullback(g.astype(accum))
    else:
        _, pullback = jax.vjp(lambda wide: pooled(wide, batch.weights), wide)
        (dcores,), dweights = pullback(g.astype(accum)), None
    if axis_name is not None:
        dcores = lax.psum(dcores, axis_name)
    return tuple(dcores), dweights


def to_dense(cores: Cores, num_embeddings: int) -> jax.Array:
    """The table ``[N, D]`` in the accumulator type."""
    accum = accumulator(cores[0].dtype)
    value = cores[0].astype(accum)[:, 0]  # [P, Q, r]
    for core in cores[1:]:
        value = jnp.einsum(
            "aqr,brst->abqst", value, core.astype(accum), precision=lax.Precision.HIGHEST
        )
        p, b, q, s, t = value.shape
        value = value.reshape(p * b, q * s, t)
    return value[:num_embeddings, :, 0]


def attend(
    cores: Cores,
    query: jax.Array,
    num_embeddings: int,
    precision: Any = lax.Precision.HIGHEST,
) -> jax.Array:
    """Products of ``query[B, D]`` with every row, ``[B, N]``, without building the table."""
    accum = accumulator(cores[0].dtype, query.dtype)
    batch, columns = query.shape
    rows = 1
    # Contract the cores one by one into the query: [B, rows, r, columns] loses a q and gains a p each time.
    value = query.astype(accum).reshape(batch, 1, 1, columns)
    for core in cores:
        p, r, q, t = core.shape
        columns //= q
        value = value.reshape(batch, rows, r, q, columns)
        value = jnp.einsum("zarqx,prqt->zaptx", value, core.astype(accum), precision=precision)
        rows *= p
        value = value.reshape(batch, rows, t, columns)
    return value[:, :num_embeddings, 0, 0]


def update(
    spec: Spec,
    cores: Cores,
    slots: Sequence[tuple[jax.Array, ...]],
    batch: Batch,
    residuals: tuple[jax.Array, ...],
    g: jax.Array,
    *,
    kind: int,
    hyper: jax.Array,
    inv_scale: jax.Array,
    seed: jax.Array,
    skip_nonfinite: bool,
    stochastic: bool,
    want_weights: bool,
    axis_name: Any = None,
) -> tuple[tuple[jax.Array, ...], tuple[tuple[jax.Array, ...], ...], jax.Array, jax.Array | None]:
    """Gradient and one optimizer step on the touched rows.

    Returns:
        New cores and slots, 1.0 if the step was applied (0.0 if skipped), and the gradient of the weights,
        which is that of the rows before the step.
    """
    grads, dweights = backward(spec, cores, batch, residuals, g, want_weights, axis_name)
    grads = tuple(grad * inv_scale.astype(grad.dtype) for grad in grads)
    touched = _touched(spec, batch, axis_name)
    applied = jnp.ones((), bool)
    if skip_nonfinite:
        applied = jnp.all(jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads]))
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    new_cores, new_slots = [], []
    for k, (core, slot, grad, rows_touched) in enumerate(
        zip(cores, slots, grads, touched, strict=True)
    ):
        flat = core.reshape(core.shape[0], math.prod(core.shape[1:]))
        old = flat.astype(grad.dtype)
        new, stepped = RULES[kind].update_rows(old, grad.reshape(flat.shape), slot, hyper)
        new = round_to(new, core.dtype, jax.random.fold_in(key, k) if stochastic else None)
        keep = rows_touched & applied
        new_cores.append(jnp.where(keep[:, None], new, flat).reshape(core.shape))
        new_slots.append(
            tuple(
                jnp.where(keep if now.ndim == 1 else keep[:, None], now.astype(was.dtype), was)
                for now, was in zip(stepped, slot, strict=True)
            )
        )
    return tuple(new_cores), tuple(new_slots), applied.astype(jnp.float32), dweights


def _touched(spec: Spec, batch: Batch, axis_name: Any) -> list[jax.Array]:
    """Which rows of each core the batch reads, whatever their gradient; bool ``[p_k]`` each."""
    digits, ok = digits_in_range(spec, batch)
    here = present(batch)
    if spec.bounds in (*IGNORED, "error"):
        here = here & ok
    touched = []
    for digit, factor in zip(digits, spec.row_factors, strict=True):
        count = jnp.zeros(factor, jnp.int32).at[digit]
        count = count.max(here.astype(jnp.int32), mode="drop", wrap_negative_indices=False)
        touched.append((count if axis_name is None else lax.psum(count, axis_name)) > 0)
    return touched
