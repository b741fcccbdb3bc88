"""Arguments and calls of a layer: code shared by NNX and linen."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._ids.bags import Bags
from jax_tt._lookup.calls import pooled_rows
from jax_tt._ops.cross_entropy import softmax_cross_entropy
from jax_tt._ops.lookups import attend
from jax_tt._table.copies import with_default_stddev
from jax_tt._table.options import Lookup, StepInputs, check_static
from jax_tt._table.table import Table
from jax_tt._table.types import State

# Fields of `Lookup` that are arguments of layers; `combiner` is one of layers that pool.
CALL_OPTIONS = ("bounds", "dtype", "precision", "method", "axis_name")


@dataclasses.dataclass(frozen=True, eq=False)
class GivenState:
    """The state that a layer starts with, in place of an initial one.

    It is compared by identity, so that it may be an attribute of a linen module.
    """

    arrays: State

    def params(self, table: Table) -> dict[str, jax.Array]:
        """Copies of the parameters."""
        return {name: jnp.array(self.arrays[name]) for name in table.spec.param_names}

    def rest(self, table: Table) -> dict[str, jax.Array]:
        """Copies of all other arrays."""
        names = dict.fromkeys((*table.spec.trained_names, *table.spec.buffers))
        return {
            name: jnp.array(self.arrays[name])
            for name in names
            if name not in table.spec.param_names
        }


def described(
    factory: Callable[..., Table], given: Mapping[str, Any]
) -> tuple[Table, Lookup, dict[str, Any]]:
    """Makes a table with `dense_table` or `tt_table`; returns it, the options of its calls, and the other arguments."""
    rest = dict(given)
    call_options = {name: rest.pop(name) for name in ("combiner", *CALL_OPTIONS) if name in rest}
    table_options = {name: rest.pop(name) for name in parameters(factory) if name in rest}
    lookup = Lookup(**{"bounds": "warn", **call_options})
    table = factory(**table_options)
    if table.update is not None:
        check_static("optimizer", table.update.optimizer)
    return table, lookup, rest


def scaled_as_embed(table: Table) -> Table:
    """The table with the initial scale of ``nnx.Embed`` where the user has chosen none: rows of about unit length."""
    return with_default_stddev(table, 1 / math.sqrt(table.features))


@functools.cache
def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name."""
    return inspect.signature(function).parameters


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
    query, state = _promoted(table, state, query, promote)
    return attend(table, state, query, precision=lookup.precision)


def cross_entropy(
    table: Table,
    state: State,
    hidden: jax.Array,
    targets: Any,
    block: int | None,
    lookup: Lookup,
    promote: Callable[..., Any],
) -> jax.Array:
    """`softmax_cross_entropy` of a layer; ``promote`` is as in `attended`."""
    hidden, state = _promoted(table, state, hidden, promote)
    return softmax_cross_entropy(
        table, state, hidden, targets, block=block, precision=lookup.precision
    )


def _promoted(
    table: Table, state: State, query: jax.Array, promote: Callable[..., Any]
) -> tuple[jax.Array, State]:
    names = table.spec.attended_names
    query, *arrays = promote(query, *(state[name] for name in names))
    return query, {**state, **dict(zip(names, arrays, strict=True))}


@functools.cache
def for_evaluation(lookup: Lookup) -> Lookup:
    """The options of a call outside training."""
    return lookup.replace(train=False)


def check_value(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises if an initialiser did not return floats of the expected shape."""
    if tuple(value.shape) != shape or not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
        raise ValueError(
            f"{name}: its initialiser returned {value.dtype}{list(value.shape)}; expected floats of shape "
            f"{list(shape)}, from a callable (key, shape, dtype) -> array."
        )


class BagCalls:
    """The call of layers that return one pooled vector per bag of ids."""

    def __call__(
        self: Any,
        bags: Bags | jax.Array,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Pools the rows of every bag.

        Args:
            bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
            grad_scale, hyperparameters: as in `TTEmbed`.

        Returns:
            ``[B, features]``; an empty bag is 0.
        """
        return self._call(pooled_rows, bags, grad_scale, hyperparameters)


OfTables = Mapping[str, Mapping[str, Any]] | None


class FeatureCalls:
    """The calls of an `EmbedCollection`, in the three forms of its result."""

    def __call__(
        self: Any, batch: Any, *, grad_scale: Any = None, hyperparameters: OfTables = None
    ) -> dict[str, jax.Array]:
        """Looks up all features.

        Args:
            batch: a dict of all features, or `KeyedBags`. The value of a feature is `Bags` or ids ``[B, L]``, or, for
                a sequence, integers of any shape or `Bags`; `SplitIds` where the table takes them.
            grad_scale: the scale of the loss, by which tables with an optimizer divide their gradients.
            hyperparameters: fields of the optimizers for this call, by table and name, e.g.
                ``{"user": {"learning_rate": rate}}``.

        Returns:
            By feature, ``[B, D]``; ``[*ids.shape, D]`` for a sequence, and ``[capacity, D]`` for one of ragged bags.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the feature and the table.
        """
        return self._call(batch, "features", grad_scale, hyperparameters)

    def concatenated(
        self: Any, batch: Any, *, grad_scale: Any = None, hyperparameters: OfTables = None
    ) -> jax.Array:
        """All columns of all features side by side, in the order of the features.

        Args:
            batch, grad_scale, hyperparameters: as in ``__call__``; every feature has one vector per sample.

        Returns:
            ``[B, total D]``.
        """
        return self._call(batch, "concatenated", grad_scale, hyperparameters)

    def stacked(
        self: Any, batch: Any, *, grad_scale: Any = None, hyperparameters: OfTables = None
    ) -> jax.Array:
        """`concatenated` with an axis of features, which must have the same width: ``[B, F, D]``."""
        return self._call(batch, "stacked", grad_scale, hyperparameters)
