"""Values that a loss may not be differentiated through."""

from __future__ import annotations

import functools
from typing import Any

import jax


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
