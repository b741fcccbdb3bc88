"""Pure JAX twins of the native ops: same signatures, always available, differentiable, the test oracle.

Every function takes the canonical `Batch` and works in the accumulator type (float32, or float64 for float64).
A dense table is passed as a tuple of one core ``[N, D]``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ops._batch import Batch, pool, present
from jax_tt._ops._canonical import accumulator
from jax_tt._ops._ids import digits_in_range
from jax_tt._ops._spec import DenseSpec, Spec

Cores = Sequence[jax.Array]
_PRECISE = lax.Precision.HIGHEST


def rows(spec: Spec, cores: Cores, batch: Batch) -> jax.Array:
    """Row of every position ``[S, cap, D]``: 0 where nothing is present, bounds applied."""
    digits, ok = digits_in_range(spec, batch)
    accum = accumulator(cores[0].dtype)
    # Up-cast before the gather: its transpose then sums duplicate gradients in the accumulator type.
    slices = [core.astype(accum)[digit] for core, digit in zip(cores, digits, strict=True)]
    if isinstance(spec, DenseSpec):
        value = slices[0]
    else:
        value = slices[0][:, :, 0]  # [S, cap, q_1, r_2]
        for core in slices[1:]:
            value = jnp.einsum("scar,scrbt->scabt", value, core, precision=_PRECISE)
            s, c, a, b, t = value.shape
            value = value.reshape(s, c, a * b, t)
        value = value[..., 0]
    here = present(batch)
    if spec.bounds == "zero":
        here = here & ok
    elif spec.bounds == "error":
        value = jnp.where(ok[..., None], value, jnp.nan)
    return jnp.where(here[..., None], value, 0)


def forward(
    spec: Spec, cores: Cores, batch: Batch, save: bool = False
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Weighted sums of rows ``[S, nb, D]``, and no residuals."""
    del save
    value = rows(spec, cores, batch)
    if batch.weights is not None:
        # A position that is not present may carry any weight, NaN included.
        weights = jnp.where(present(batch), batch.weights, 0).astype(value.dtype)
        value = value * weights[..., None]
    return pool(batch, value), ()


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
    wide = tuple(core.astype(accum) for core in cores)

    def pooled(wide: Cores, weights: Any) -> jax.Array:
        return forward(spec, wide, Batch(batch.ids, batch.offsets, weights, batch.padded, batch.rectangular))[0]

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
        value = jnp.einsum("aqr,brst->abqst", value, core.astype(accum), precision=_PRECISE)
        p, b, q, s, t = value.shape
        value = value.reshape(p * b, q * s, t)
    return value[:num_embeddings, :, 0]


def attend(cores: Cores, query: jax.Array, num_embeddings: int) -> jax.Array:
    """Products of ``query[B, D]`` with every row, ``[B, N]``, without building the table."""
    accum = jnp.promote_types(accumulator(cores[0].dtype), query.dtype)
    batch, columns = query.shape
    rows = 1
    # Contract the cores one by one into the query: [B, rows, r, columns] loses a q and gains a p each time.
    value = query.astype(accum).reshape(batch, 1, 1, columns)
    for core in cores:
        p, r, q, t = core.shape
        columns //= q
        value = value.reshape(batch, rows, r, q, columns)
        value = jnp.einsum("zarqx,prqt->zaptx", value, core.astype(accum), precision=_PRECISE)
        rows *= p
        value = value.reshape(batch, rows, t, columns)
    return value[:, :num_embeddings, 0, 0]
