"""Checks of the options and of the inputs of the updates of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_tt._collection.collection import Collection
from jax_tt._collection.states import listed
from jax_tt._table.options import Lookup


def check_lookup(lookup: Lookup) -> None:
    """Raises for options that a collection does not have."""
    if not isinstance(lookup, Lookup):
        raise TypeError(f"lookup: got {lookup!r}; expected a jax_tt.Lookup.")
    if lookup.combiner != "sum":
        raise ValueError(
            f"lookup: got combiner={lookup.combiner!r}; every feature has its own, e.g. "
            f"jax_tt.Feature('item', combiner={lookup.combiner!r})."
        )


def step_arguments(
    collection: Collection, grad_scale: Any, hyperparameters: Any
) -> dict[str, tuple[Any, Mapping[str, Any] | None]]:
    """The loss scale and the hyper-parameters of every table, by table and name, from the arguments of a call."""
    if not isinstance(collection, Collection):
        raise TypeError(
            f"collection: got a {type(collection).__name__}; expected a description of tables and features, "
            "jax_tt.Collection(tables, features)."
        )
    if hyperparameters is not None:
        _check(collection, hyperparameters)
    given = hyperparameters or {}
    if grad_scale is not None and all(table.update is None for table in collection.tables.values()):
        raise ValueError(
            "grad_scale: got a loss scale for a collection without optimizers; its gradients are ordinary ones, so "
            "divide them by the scale after jax.grad, or describe tables with an optimizer."
        )
    return {
        name: (None, None) if table.update is None else (grad_scale, given.get(name))
        for name, table in collection.tables.items()
    }


def _check(collection: Collection, given: Any) -> None:
    if not isinstance(given, Mapping) or not all(
        isinstance(own, Mapping) for own in given.values()
    ):
        raise TypeError(
            f"hyperparameters: got {given!r}; expected a mapping from tables to mappings from names to scalars, e.g. "
            "{'item': {'learning_rate': 0.01}}."
        )
    for name in given:
        if name not in collection.tables:
            raise ValueError(
                f"hyperparameters: got the table {name!r}; expected some of {listed(collection.tables)}."
            )
        if collection.tables[name].update is None:
            raise ValueError(
                f"hyperparameters[{name!r}]: got some for a table without an optimizer, which optax steps; give them "
                "to the optax transformation, or describe the table with an optimizer."
            )
