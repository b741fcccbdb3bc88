"""Limits of the gradients of looked-up rows, for the updates of their tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_scalar
from jax_tt._table.options import Update


class _Limits(NamedTuple):
    """Of every column, or of all.

    Attributes:
        most: the largest absolute value of an element of the gradient.
        passes: whether an element that is not finite is left for the update to find.
    """

    most: jax.Array
    passes: jax.Array


def limited(rows: jax.Array, update: Update | None, grad_scale: Any) -> jax.Array:
    """``rows``, whose gradient is limited as ``update`` says, in units of the loss before it was scaled."""
    return limited_columns(rows, [(update, grad_scale, rows.shape[-1])])


def limited_columns(rows: jax.Array, parts: Sequence[tuple[Update | None, Any, int]]) -> jax.Array:
    """`limited` for columns of several tables: the update, the scale and the number of columns of each in turn."""
    if all(update is None or update.max_gradient is None for update, _, _ in parts):
        return rows
    limits = [_limits(update, grad_scale, columns) for update, grad_scale, columns in parts]
    return _identity(rows, _Limits(*(jnp.concatenate(own) for own in zip(*limits, strict=True))))


def _limits(update: Update | None, grad_scale: Any, columns: int) -> _Limits:
    most = jnp.asarray(jnp.inf, jnp.float32)
    if update is not None and update.max_gradient is not None:
        most = jnp.asarray(update.max_gradient, jnp.float32)
        if grad_scale is not None:
            most = most * jnp.asarray(as_scalar("grad_scale", grad_scale), jnp.float32)
    passes = jnp.asarray(update is not None and update.skip_nonfinite)
    return _Limits(*(jnp.broadcast_to(value, (columns,)) for value in (most, passes)))


@jax.custom_vjp
def _identity(rows: jax.Array, limits: _Limits) -> jax.Array:
    del limits
    return rows


def _fwd(rows: jax.Array, limits: _Limits) -> tuple[jax.Array, _Limits]:
    return rows, limits


def _bwd(limits: _Limits, g: jax.Array) -> tuple[jax.Array, None]:
    most = jnp.broadcast_to(limits.most.astype(g.dtype), g.shape)
    passes = jnp.broadcast_to(limits.passes, g.shape) & ~jnp.isfinite(g)
    return jnp.where(passes, g, jnp.clip(g, -most, most)), None


_identity.defvjp(_fwd, _bwd)
