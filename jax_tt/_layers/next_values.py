"""`NextValues`: the next values of fused tables, out of the reach of arithmetic on gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import get_opaque_trace_state

from jax_tt._base import reports
from jax_tt._collection.next_values import Path, Start, names_of, used_flags, without_lookup
from jax_tt._lookup.one_loss import Loss

_COMBINED = (
    "gradients of a model with fused tables: they carry the next values of the tables, which are neither summed nor "
    "averaged nor compared, and do not pass through jit, scan or cond as arguments, carries or results. Update after "
    "every micro-batch and put optax.MultiSteps into tx; compute the gradients and update in the same jitted function."
)


class NextValues:
    """The "cotangents" of fused tables: static data of a pytree whose leaves are the ordinary gradients.

    Args:
        old: the arrays that the loss was differentiated at, by path.
        by_path: their next values.
        loss: what its backward pass did.
        model: the name of the model in ``loss``.
        ordinary: for error messages, an expression for the parameters without fused tables.

    Raises:
        ValueError: the loss depends on arrays not only through one lookup, as far as the trace shows it, or without
            any lookup.

    JAX compares static data where it combines two trees, and where a tree is an argument or a carry of a compiled
    function. The comparison raises, since the arrays of one of the two would be dropped.

    Next values that nothing takes are reported when they are dropped, once: the tables are not trained then.
    """

    # Of an object whose constructor has raised.
    _untaken = ""

    def __init__(
        self,
        old: Mapping[Path, Any],
        by_path: Mapping[Path, Any],
        loss: Loss,
        model: Any,
        ordinary: str,
    ) -> None:
        reached = loss.reached[model]
        if alone := without_lookup(old, reached):
            raise ValueError(
                f"value_and_grad: the loss reads {names_of(alone)} of fused tables, but looks up nothing in them. Only "
                "a lookup trains a fused table, and this gradient would be lost. Build the layer with optimizer=None "
                "and let optax step it, e.g. where it is the output weights of a model; give the rule a weight_decay "
                "instead of adding a penalty to the loss, also one with a coefficient of 0; or read "
                "jax.lax.stop_gradient(array) for what is not to be trained."
            )
        if terms := loss.with_other_terms(old, by_path):
            raise ValueError(
                f"value_and_grad: the loss depends on {names_of(terms)} of fused tables not only through one lookup, "
                "and JAX adds the other gradient to their next values. Restrict penalties to ordinary parameters, "
                f"{ordinary}, and give the optimizer of a table a weight_decay; look up all ids of a table in one "
                "call. A coefficient of 0 does not take a penalty out of the trace; leave the term out."
            )
        self.by_path = dict(by_path)
        self.start = Start(old)
        stepped = reached.intersection(used_flags(old))
        self._untaken = names_of([path[:-1] or ("the model itself",) for path in stepped])
        self._trace = get_opaque_trace_state()

    def take(self) -> NextValues:
        """These, of which nothing is reported any more."""
        self._untaken = ""
        return self

    def __del__(self) -> None:
        # After a trace has raised, its frames are dropped outside of it.
        if not self._untaken or sys.is_finalizing() or get_opaque_trace_state() != self._trace:
            return
        message = (
            f"the next values of the fused tables {self._untaken} were computed, but never taken, so that nothing "
            "trains these tables: nnx.Optimizer and optax see other parameters alone. Give the gradients to "
            "jax_tt.FusedOptimizer.update, in linen to jax_tt.linen.TrainState.apply_gradients. If a table is not to "
            "be trained, set layer.frozen = True, or pass what the layer returns through jax.lax.stop_gradient. This "
            "is said once."
        )
        reports.warn_once(("next values", self._untaken), message, RuntimeWarning)

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
