"""The state of one table, or of a collection, among the variables of a linen model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._collection.collection import Collection
from jax_tt._collection.states import UPDATES
from jax_tt._collection.statistics import STATISTICS, TOTALS
from jax_tt._lookup.shared import FLAGS
from jax_tt._table.table import Table

PARAMS = "params"
Path = tuple[str, ...]


class TableVariables:
    """The state of a table, unboxed; `replaced` boxes it again.

    Raises:
        ValueError: the variables hold no such table at ``path``, or not all of it.
    """

    def __init__(self, variables: Mapping[str, Any], path: Path, table: Table) -> None:
        self._all = _flat(variables)
        collections = {PARAMS, OVERWRITE_WITH_GRADIENT, *table.spec.buffers.values()}
        self._places = {
            place[-1]: place
            for place in self._all
            if place[0] in collections and place[1:-1] == path
        }
        where = "/".join(path) or "their top"
        for name in (*table.spec.param_names, *table.spec.buffers):
            if name not in self._places:
                collection = table.spec.buffers.get(name, PARAMS)
                raise ValueError(
                    f"variables: hold no {name} at {where} in the collection {collection!r}; expected all collections "
                    "of the model, e.g. {**state.variables, ...}, and in path= the names that lead to the layer."
                )
        self.state = {name: nn.meta.unbox(self._all[place]) for name, place in self._places.items()}
        self._first = self._places[table.spec.param_names[0]]

    def replaced(self, state: Mapping[str, Any], table: Table) -> dict[str, Any]:
        """All variables of the model, with ``state`` of ``table`` in place of the state of the old table."""
        shapes = table.spec.param_shapes
        for name in (*shapes, *table.spec.buffers):
            if name not in state or (name in shapes and jnp.shape(state[name]) != shapes[name]):
                got = f"{jnp.shape(state[name])}" if name in state else "no array"
                raise ValueError(
                    f"{table.ids.label}{name}: got {got} in the state of a {type(table).__name__} that fn returned; "
                    f"expected {shapes.get(name, 'the array of the state that fn was given, or its next value')}."
                )
        old = set(self._places.values())
        kept = {place: value for place, value in self._all.items() if place not in old}
        for name, value in state.items():
            collection = table.spec.buffers.get(name, self._first[0])
            place = self._places.get(name, (collection, *self._first[1:-1], name))
            like = None if name in table.spec.buffers else self._all[self._first]
            like = self._all.get(place, like)
            kept[place] = value if like is None else nn.meta.replace_boxed(like, value)
        return traverse_util.unflatten_dict(kept)


class CollectionVariables:
    """The state of a collection: its tables by name, and what they share.

    Raises:
        ValueError: the variables do not hold all tables at ``path``.
    """

    def __init__(self, variables: Mapping[str, Any], path: Path, collection: Collection) -> None:
        self._variables, self._path = dict(variables), path
        self.state: dict[str, Any] = {
            name: TableVariables(variables, (*path, name), table).state
            for name, table in collection.tables.items()
        }
        all_variables = _flat(variables)
        places: dict[Path, Path] = {
            (UPDATES, flag): (OVERWRITE_WITH_GRADIENT, *path, flag) for flag in FLAGS
        }
        for name in collection.tables:
            places[STATISTICS, TOTALS, name] = (STATISTICS, *path, TOTALS, name)
        self._shared = {key: place for key, place in places.items() if place in all_variables}
        shared = {key: all_variables[place] for key, place in self._shared.items()}
        self.state |= traverse_util.unflatten_dict(shared)

    def replaced(self, state: Mapping[str, Any], collection: Collection) -> dict[str, Any]:
        """All variables of the model, with ``state`` in place of the old state."""
        after = self._variables
        for name, table in collection.tables.items():
            after = TableVariables(after, (*self._path, name), table).replaced(state[name], table)
        values = _flat(after)
        shared = traverse_util.flatten_dict(
            {name: dict(state[name]) for name in (UPDATES, STATISTICS) if name in state}
        )
        values |= {place: shared[key] for key, place in self._shared.items()}
        return traverse_util.unflatten_dict(values)


def _flat(variables: Mapping[str, Any]) -> dict[Any, Any]:
    return traverse_util.flatten_dict(dict(variables), keep_empty_nodes=True)
