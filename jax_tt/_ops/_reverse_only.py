"""Refuses derivatives that native and fused ops do not have: those of forward mode, and any beyond the first."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_FORWARD = (
    "A native or fused op was differentiated in forward mode (jvp, jacfwd, linearize). Such ops have derivatives in "
    "reverse mode only, jax.grad and jax.vjp. For others use the op without 'fused', with method='reference'."
)
_TWICE = (
    "The backward pass of a native or fused op was itself differentiated (hessian, grad of grad, jvp of grad). Such "
    "ops have no higher derivatives; use the op without 'fused', with method='reference', which has all of them."
)


def reverse_only(tree: Any) -> Any:
    """The differentiable operands of a native or fused op; a forward derivative of them raises."""
    # Nothing but a tracer has a tangent. One call per leaf, so that a tangent that is zero is known to be.
    return jax.tree.map(lambda x: _reverse_only(x) if isinstance(x, Tracer) else x, tree)


@jax.custom_jvp
def _reverse_only(operand: jax.Array) -> jax.Array:
    return operand


@_reverse_only.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], _backwards.bind(tangents[0])


def first_order(tree: Any) -> Any:
    """Operands of one of its passes that `jax.grad` asked for; any derivative of them raises."""
    return jax.tree.map(lambda x: _first_order(x) if isinstance(x, Tracer) else x, tree)


@jax.custom_jvp
def _first_order(operand: jax.Array) -> jax.Array:
    return operand


@_first_order.defjvp
def _(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise TypeError(_TWICE)


def _refuse(*args: Any, **params: Any) -> NoReturn:
    del args, params
    raise TypeError(_FORWARD)


# An identity on tangents that can be transposed, which makes a gradient of it, but neither run nor compiled.
_backwards = Primitive("jax_tt_backwards")
_backwards.def_abstract_eval(lambda tangent: tangent)
_backwards.def_impl(_refuse)
mlir.register_lowering(_backwards, _refuse)
ad.deflinear(_backwards, lambda cotangent: [cotangent])
batching.defvectorized(_backwards)
