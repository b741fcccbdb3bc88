"""Raises for derivatives that there are not: forward mode, higher orders, steps under ``vmap``, and some values.

The error is raised only if the derivative is computed, not if it is dropped, e.g. by `jax.lax.stop_gradient`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_tt._jax.vma import vary_over, varying_axes

Tree = TypeVar("Tree")

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
    leaves, structure = jax.tree.flatten(tree)
    if not any(isinstance(x, Tracer) for x in leaves):  # no other arrays have tangents
        return tree
    return jax.tree.unflatten(structure, _reverse_only.bind(*leaves))


def _marked(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """The tangents that are not known to be zero pass through a mark."""
    live = [k for k, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    after = dict(zip(live, _backwards.bind(*(tangents[k] for k in live)), strict=True))
    return list(primals), [after.get(k, tangent) for k, tangent in enumerate(tangents)]


def first_order(operands: Tree) -> tuple[Tree, jax.Array | None]:
    """The operands of the forward or backward pass of `jax.grad`, and the witness that `of_first_order` takes."""
    traced = [x for x in jax.tree.leaves(operands) if isinstance(x, Tracer) and _is_float(x)]
    return (jax.tree.map(_stopped, operands), _witness(traced)) if traced else (operands, None)


def _stopped(x: Any) -> Any:
    # Scalars of numpy stay constants of the program.
    return lax.stop_gradient(x) if x.ndim or isinstance(x, Tracer) else x


def of_first_order(results: Tree, witness: jax.Array | None) -> Tree:
    """The results of that pass; any derivative of them raises."""
    if witness is None:
        return results
    leaves, structure = jax.tree.flatten(results)
    floats = [k for k, x in enumerate(leaves) if _is_float(x)]
    for k, x in zip(floats, _depending([leaves[k] for k in floats], witness), strict=True):
        leaves[k] = x
    return jax.tree.unflatten(structure, leaves)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@jax.custom_jvp
def _witness(operands: list[jax.Array]) -> jax.Array:
    """A scalar with a tangent if any of the operands has one; this tangent raises."""
    return vary_over(jnp.zeros((), jnp.float32), varying_axes(operands))


@_witness.defjvp
def _(primals: Any, tangents: Any) -> Any:
    changes = [jnp.sum(tangent.astype(jnp.float32)) for tangent in tangents[0]]
    return _witness(*primals), _higher.bind(sum(changes[1:], changes[0]))[0]


@jax.custom_jvp
def _depending(values: list[jax.Array], witness: jax.Array) -> list[jax.Array]:
    """``values``, with tangents if ``witness`` has one."""
    del witness
    return values


@_depending.defjvp
def _(primals: Any, tangents: Any) -> Any:
    values, change = primals[0], tangents[1]

    def of(value: jax.Array) -> jax.Array:
        more = varying_axes(change) - varying_axes(value)
        one = lax.psum(change, tuple(more)) if more else change
        return jnp.zeros_like(value) + jnp.broadcast_to(one, value.shape).astype(value.dtype)

    return _depending(*primals), [of(value) for value in values]


def _identity(name: str) -> Primitive:
    one = Primitive(name)
    one.multiple_results = True
    one.def_abstract_eval(lambda *operands: operands)
    batching.primitive_batchers[one] = lambda operands, axes: (one.bind(*operands), axes)
    return one


def _mark(name: str, message: str, transpose: Callable[[Primitive, Any], Any]) -> Primitive:
    """An identity on tangents that raises when it is run or compiled."""

    def refuse(*args: Any, **params: Any) -> NoReturn:
        del args, params
        raise TypeError(message)

    mark = _identity(name)
    mark.def_impl(refuse)
    mlir.register_lowering(mark, refuse)
    ad.deflinear(mark, lambda cotangents: transpose(mark, cotangents))
    return mark


_reverse_only = _identity("jax_tt_reverse_only")
_reverse_only.def_impl(lambda *operands: operands)
mlir.register_lowering(_reverse_only, lambda _, *operands: operands)
ad.primitive_jvps[_reverse_only] = _marked
# Its transpose is the identity, because reverse mode is supported.
_backwards = _mark("jax_tt_backwards", _FORWARD, lambda mark, cotangents: cotangents)
_higher = _mark(
    "jax_tt_higher",
    _TWICE,
    lambda mark, cotangents: [x if isinstance(x, ad.Zero) else mark.bind(x)[0] for x in cotangents],
)


@jax.custom_batching.custom_vmap
def once(operands: Any, witness: Any) -> Any:
    """Identity on ``operands`` that raises under ``vmap``.

    Args:
        operands: batches and the output cotangents of their updates.
        witness: small leaves of the tables, which are mapped if the tables are.
    """
    del witness
    return operands


@once.def_vmap
def _once_rule(axis_size: int, in_batched: Any, operands: Any, witness: Any) -> Any:
    del axis_size, in_batched, operands, witness
    raise ValueError(_VMAP)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def refuse_gradient(message: str, tree: Any) -> Any:
    """Returns ``tree``; a backward pass that reaches it raises ``TypeError(message)``.

    Values that are not differentiated (metrics, evaluation) are allowed.
    """
    del message
    return tree


def _forward(message: str, tree: Any) -> tuple[Any, None]:
    del message
    return tree, None


def _backward(message: str, residuals: None, cotangent: Any) -> Any:
    del residuals, cotangent
    raise TypeError(message)


refuse_gradient.defvjp(_forward, _backward)
