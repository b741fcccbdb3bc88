"""Raises for derivatives that native and fused ops do not have: forward mode, higher orders, and steps under ``vmap``.

The error is raised only if the derivative is computed, not if it is dropped, e.g. by `jax.lax.stop_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_tt._jax.vma import vary_over, varying_axes

Result = TypeVar("Result")

_FORWARD = (
    "A native or fused op was differentiated in forward mode (jvp, jacfwd, linearize). Such ops have derivatives in "
    "reverse mode only, jax.grad and jax.vjp. For others use the op without 'fused', with method='reference'."
)
_TWICE = (
    "The backward pass of a native or fused op was itself differentiated (hessian, grad of grad, jvp of grad). Such "
    "ops have no higher derivatives; use the op without 'fused', with method='reference', which has all of them."
)
_VMAP = (
    "A fused op was differentiated under jax.vmap. Its cotangent is the new table, and JAX would add one per "
    "mapped example. Put all examples into one call (Bags, or ids [B, L]) outside vmap, or use the op without "
    "'fused' and optax."
)


def reverse_only(tree: Any) -> Any:
    """Identity on the differentiable operands of a native or fused op; forward-mode derivatives of it raise."""
    # Only tracers have tangents. One call per leaf keeps symbolic zeros of the tangents.
    return jax.tree.map(lambda x: _reverse_only(x) if isinstance(x, Tracer) else x, tree)


@jax.custom_jvp
def _reverse_only(operand: jax.Array) -> jax.Array:
    return operand


@_reverse_only.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], _backwards.bind(tangents[0])


def first_order(one_pass: Callable[..., Result], *operands: Any) -> Result:
    """``one_pass(*operands)``, the forward or backward pass of `jax.grad`; any derivative of it raises."""
    traced = [x for x in jax.tree.leaves(operands) if isinstance(x, Tracer) and _is_float(x)]
    if not traced:
        return one_pass(*operands)
    witness = _witness(traced)
    result = one_pass(*lax.stop_gradient(operands))
    return jax.tree.map(lambda x: _depending(x, witness) if _is_float(x) else x, result)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@jax.custom_jvp
def _witness(operands: list[jax.Array]) -> jax.Array:
    """A scalar with a tangent if any of the operands has one; this tangent raises."""
    return vary_over(jnp.zeros((), jnp.float32), varying_axes(operands))


@_witness.defjvp
def _(primals: Any, tangents: Any) -> Any:
    changes = [jnp.sum(tangent.astype(jnp.float32)) for tangent in tangents[0]]
    return _witness(*primals), _higher.bind(sum(changes[1:], changes[0]))


@jax.custom_jvp
def _depending(value: jax.Array, witness: jax.Array) -> jax.Array:
    """``value``, with a tangent if ``witness`` has one."""
    del witness
    return value


@_depending.defjvp
def _(primals: Any, tangents: Any) -> Any:
    value, change = primals[0], tangents[1]
    if more := varying_axes(change) - varying_axes(value):
        change = lax.psum(change, tuple(more))
    change = jnp.broadcast_to(change, value.shape).astype(value.dtype)
    return _depending(*primals), jnp.zeros_like(value) + change


def _mark(name: str, message: str, transpose: Callable[[Primitive, Any], Any]) -> Primitive:
    """An identity on tangents that raises when it is run or compiled."""

    def refuse(*args: Any, **params: Any) -> NoReturn:
        del args, params
        raise TypeError(message)

    mark = Primitive(name)
    mark.def_abstract_eval(lambda tangent: tangent)
    mark.def_impl(refuse)
    mlir.register_lowering(mark, refuse)
    ad.deflinear(mark, lambda cotangent: [transpose(mark, cotangent)])
    batching.defvectorized(mark)
    return mark


# Its transpose is the identity, because reverse mode is supported.
_backwards = _mark("jax_tt_backwards", _FORWARD, lambda mark, cotangent: cotangent)
_higher = _mark("jax_tt_higher", _TWICE, lambda mark, cotangent: mark.bind(cotangent))


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
