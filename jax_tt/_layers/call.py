"""Calls of a layer: code shared by NNX and linen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jax_tt._layers.guard import refuse_gradient
from jax_tt._ops.attend import attend
from jax_tt._table.options import Lookup, StepInputs
from jax_tt._table.table import Table
from jax_tt._table.types import State


def step_inputs(
    table: Table,
    grad_scale: Any,
    hyperparameters: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> StepInputs:
    """The update inputs of a call; ``fields`` are hyper-parameters that are variables of the layer."""
    if table.update is not None:
        if hyperparameters is not None and not isinstance(hyperparameters, Mapping):
            raise TypeError(
                f"hyperparameters: got {hyperparameters!r}; expected a mapping from names to scalars, e.g. "
                "{'learning_rate': 0.01}."
            )
        return StepInputs(grad_scale, None, {**fields, **(hyperparameters or {})})
    if grad_scale is not None:
        raise ValueError(
            "grad_scale: got a loss scale for a layer with optimizer=None; its gradients are ordinary "
            "ones, so divide them by the scale after nnx.grad, or build the layer with an optimizer."
        )
    if hyperparameters is not None:
        raise ValueError(
            "hyperparameters: got some for a layer with optimizer=None, which optax steps; give them to the optax "
            "transformation, e.g. with optax.inject_hyperparams, or build the layer with an optimizer."
        )
    return StepInputs()


def attended(
    table: Table, state: State, query: jax.Array, lookup: Lookup, promote: Callable[..., Any]
) -> jax.Array:
    """Scores of queries against every row; the parameters of a fused table are constants here.

    ``promote`` casts queries and parameters to a common type.
    """
    names = table.spec.attended_names
    query, *arrays = promote(query, *(state[name] for name in names))
    params: dict[str, Any] = dict(zip(names, arrays, strict=True))
    if table.update is not None:
        name = type(table.update.optimizer).__name__
        message = (
            f"{table.ids.label}attend is part of the loss, but the table is fused (optimizer={name}): its gradient "
            "touches "
            "every row and cannot be fused into a lookup. Build the layer with optimizer=None and let optax step it, "
            "or use the scores outside the loss only."
        )
        params = dict(refuse_gradient(message, params))
    return attend(table, {**state, **params}, query, precision=lookup.precision)


@functools.cache
def for_evaluation(lookup: Lookup) -> Lookup:
    """The options of a call outside training."""
    return dataclasses.replace(lookup, train=False)


def check_value(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises if an initialiser did not return floats of the expected shape."""
    if tuple(value.shape) != shape or not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
        raise ValueError(
            f"{name}: its initialiser returned {value.dtype}{list(value.shape)}; expected floats of shape "
            f"{list(shape)}, from a callable (key, shape, dtype) -> array."
        )
