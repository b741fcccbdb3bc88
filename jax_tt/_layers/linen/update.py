"""`update_table`: what is done to a table between steps, on the variables of a linen model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._base.arguments import type_of
from jax_tt._collection.collection import Collection
from jax_tt._collection.states import UPDATES
from jax_tt._collection.statistics import STATISTICS, TOTALS
from jax_tt._layers.change import carried, check_cores, check_state
from jax_tt._layers.linen.collection import EmbedCollection
from jax_tt._layers.linen.gradients import PARAMS
from jax_tt._layers.linen.table import TableModule
from jax_tt._lookup.shared import FLAGS
from jax_tt._table.change import Carry, Change
from jax_tt._table.table import Table

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ChangedLayer:
    """The first result of `update_table` where the function returned a table.

    Attributes:
        layer: the module with the new sizes, order and cache; a model must build its layer with these:
            ``layer.num_embeddings``, ``layer.row_factors``, and so on, or ``layer.table`` and ``layer.tables``.
        approximation: `tt.Approximation` of a table that was reordered; otherwise None.
        params: the shapes of ``variables["params"]`` before the change.
        carry: rules for the optax state of parameters, by path.
        tables: the table before and after.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen, optax
        >>> layer = jax_tt.linen.TTEmbed(1000, 8, tt_ranks=4)
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> tx = optax.adam(0.01)
        >>> opt_state = tx.init(variables["params"])
        >>> changed, variables = jax_tt.linen.update_table(
        ...     layer, variables, lambda table, state: jax_tt.tables.grow(
        ...         table, state, 1200, key=jax.random.key(1)
        ...     )
        ... )
        >>> opt_state = changed.opt_state(tx, opt_state, variables)
        >>> opt_state[0].mu["core_0"].shape
        (12, 1, 2, 4)
    """

    layer: Any
    approximation: Any
    params: Any
    carry: Mapping[Path, Carry]
    tables: tuple[Any, Any]

    def opt_state(
        self, tx: optax.GradientTransformation, opt_state: Any, variables: Mapping[str, Any]
    ) -> Any:
        """The optax state for the changed parameters: it moves with the rows, and is initial for new rows.

        Args:
            tx: the transformation of ``variables["params"]``.
            opt_state: its state before the change.
            variables: all collections after the change.

        Raises:
            ValueError: ``opt_state`` belongs to other parameters, or to another number of cores.
        """
        check_state("opt_state", tx, opt_state, self.params, "the layer before the change")
        before, after = self.tables
        if isinstance(before, Table) and before.update is None:
            check_cores("opt_state", before, after)

        def rule(keys: Any) -> Carry | None:
            return self.carry.get(
                tuple(key.key for key in keys if isinstance(key, jax.tree_util.DictKey))
            )

        return carried(tx, opt_state, variables[PARAMS], rule)


def update_table(
    layer: nn.Module, variables: Mapping[str, Any], fn: Callable[[Any, Any], Any], *, path: str = ""
) -> tuple[Any, dict[str, Any]]:
    """Applies a function of a table and its state to the table of a layer, among the variables of a model.

    It inserts and removes keys, lets tables grow, changes the order of ids and maintains caches with the functions that
    do so without Flax. Call it outside of what is differentiated; under ``jit`` if ``fn`` works there.

    Args:
        layer: the layer, or an `EmbedCollection`.
        variables: all collections of the model.
        fn: maps the description of the table and its arrays by name (of a collection, the `Collection` and its arrays
            by table and name) to one of: ``result, state``, such as `dynamic.insert` computes; a new table and its
            state, as from `tables.grow`, `tables.reorder` and `dynamic.grow_if_full`; or the state alone.
        path: path of the layer in the collections, e.g. ``"tower/items"``; empty if the layer is the model.

    Returns:
        The result, and the variables. Where ``fn`` returned a table, the result is a `ChangedLayer`; where it
        returned the state alone, None.

    Raises:
        TypeError, ValueError: ``layer`` has no table, the variables hold none at ``path``, or ``fn`` returned
            something else.

    Example:
        >>> import jax, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.hash_table(64, 16, max_capacity=256))
        >>> keys = np.arange(40)
        >>> variables = layer.init(jax.random.key(0), keys)
        >>> inserted, variables = jax_tt.linen.update_table(
        ...     layer, variables, lambda table, state: jax_tt.dynamic.insert(table, state, keys)
        ... )
        >>> int(inserted.counts["inserted"])
        40
        >>> changed, variables = jax_tt.linen.update_table(
        ...     layer, variables, lambda table, state: jax_tt.dynamic.grow_if_full(table, state, max_load=0.5)
        ... )
        >>> changed.layer.table.num_embeddings, variables["params"]["embedding"].shape
        (128, (128, 16))
    """
    if not isinstance(path, str):
        raise TypeError(f"path: got {path!r}; expected names joined by '/', e.g. 'tower/items'.")
    place = tuple(path.split("/")) if path else ()
    if isinstance(layer, EmbedCollection):
        before: Any = layer._described()
        held: Any = CollectionVariables(variables, place, before)
    elif isinstance(layer, TableModule):
        before = layer._described(path)
        held = TableVariables(variables, place, before)
    else:
        raise TypeError(
            f"layer: got {type_of(layer)}; expected a layer of jax_tt.linen. Give the path of a layer inside "
            "a model as path=."
        )
    returned = fn(before, held.state)
    if isinstance(returned, tuple) and isinstance(returned[0], Table | Collection):
        returned = Change(returned[0], returned[1], {})
    if not isinstance(returned, Change):
        result, state = _result_and_state(returned)
        return result, held.replaced(state, before)
    table, state = returned
    carry: Any = traverse_util.flatten_dict(dict(returned.carry))
    changed = ChangedLayer(
        layer if table is before else layer._rebuilt(before, table),
        returned.approximation,
        jax.eval_shape(lambda: variables.get(PARAMS, {})),
        {(*place, *names): rule for names, rule in carry.items()},
        (before, table),
    )
    return changed, held.replaced(state, table)


def _result_and_state(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    pair = (None, returned) if isinstance(returned, Mapping) else returned
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], Mapping):
        kinds = ", ".join(type(x).__name__ for x in (pair if type(pair) is tuple else [pair]))
        raise TypeError(f"fn: returned {kinds}; expected a state, or a result and a state.")
    return pair


class TableVariables:
    """The state of a table, unboxed; `replaced` boxes it again."""

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
                    f"{table.ids.label}{name}: got {got} in the state of {type_of(table)} that fn returned; "
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
    """The state of a collection: its tables by name, and what they share."""

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
