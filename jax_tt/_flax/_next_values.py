"""`NextValues`: the next values of fused tables, out of the reach of arithmetic on gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

_COMBINED = (
    "gradients of a model with fused tables: they carry the next values of the tables, which are neither summed nor "
    "averaged nor compared, and do not pass through jit, scan or cond as arguments, carries or results. Update after "
    "every micro-batch and put optax.MultiSteps into tx; compute the gradients and update in the same jitted function."
)


class NextValues:
    """The "cotangents" of fused tables: static data of a pytree whose leaves are the ordinary gradients.

    JAX compares static data where it combines two trees, and where a tree is an argument or a carry of a compiled
    function. The comparison raises, since the arrays of one of the two would be dropped.
    """

    def __init__(self, by_path: Mapping[tuple[Any, ...], Any]) -> None:
        self.by_path = dict(by_path)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        raise TypeError(_COMBINED)

    def __hash__(self) -> int:
        raise TypeError(_COMBINED)


def without_value(value_and_grad: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The function that `jax.grad` returns, from the one that `jax.value_and_grad` returns."""

    @functools.wraps(value_and_grad)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradients
