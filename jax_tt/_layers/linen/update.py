"""`update_table`: what is done to a table between steps, on the variables of a linen model, and who calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jax_tt._base.arguments import instance_of, mismatch, type_of
from jax_tt._collection.collection import Collection
from jax_tt._collection.states import UPDATES
from jax_tt._collection.statistics import STATISTICS, TOTALS
from jax_tt._kinds.cached.table import DIRECTORY
from jax_tt._layers.change import carried, check_cores, check_state
from jax_tt._layers.linen.collection import EmbedCollection
from jax_tt._layers.linen.gradients import PARAMS
from jax_tt._layers.linen.table import TableEmbed, trained_collection
from jax_tt._lookup.shared import SHARED
from jax_tt._table.change import Carry, Change, has_cache, maintain
from jax_tt._table.state import State
from jax_tt._table.table import Table

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ChangedLayer:
    """The first result of `update_table` where the function returned a table.

    Attributes:
        layer: the module with the new sizes, order and cache; a model must build its layer with these:
            ``layer.table``, or ``layer.tables`` of a collection.
        approximation: `tt.Approximation` of a table that was reordered; otherwise None.
        params: the shapes of ``variables["params"]`` before the change.
        carry: rules for the optax state of parameters, by path.
        tables: the table before and after.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen, optax
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.tt_table(1000, 8, tt_ranks=4))
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

    It inserts and removes keys, lets tables grow, changes the order of ids, maintains caches, and freezes and replaces
    tables with the functions that do so without Flax. Call it outside of what is differentiated; under ``jit`` if
    ``fn`` works there.

    Args:
        layer: the layer, or an `EmbedCollection`.
        variables: all collections of the model.
        fn: maps the description of the table and its arrays by name (of a collection, the `Collection` and its arrays
            by table and name) to one of: ``result, state``, such as `dynamic.insert` computes; a new table and its
            state, as from `tables.grow`, `dynamic.grow_if_full`, `extension.freeze` or `Collection.with_tables`; or
            the state alone.
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
    instance_of("path", path, str, "names joined by '/', e.g. 'tower/items'")
    place = tuple(path.split("/")) if path else ()
    fix = "Give the path of a layer inside a model as path=."
    instance_of("layer", layer, TableEmbed | EmbedCollection, "a layer of jax_tt.linen", fix)
    before: Any = layer._described(path) if isinstance(layer, TableEmbed) else layer._described()
    held: Any = traverse_util.flatten_dict(dict(variables), keep_empty_nodes=True)
    places = _places(before, place, held)
    state = {key: nn.meta.unbox(held[at]) for key, at in places.items()}
    returned = fn(before, traverse_util.unflatten_dict(state))
    if isinstance(returned, tuple) and isinstance(returned[0], Table | Collection):
        returned = Change(returned[0], returned[1], {})
    table = before
    if isinstance(returned, Change):
        table, state = returned
        carry: Any = traverse_util.flatten_dict(dict(returned.carry))
        result: Any = ChangedLayer(
            layer if table is before else layer._rebuilt(before, table),
            returned.approximation,
            jax.eval_shape(lambda: variables.get(PARAMS, {})),
            {(*place, *names): rule for names, rule in carry.items()},
            (before, table),
        )
    else:
        result, state = _result_and_state(returned)
    _check_returned(table, state)
    gone = set(places.values())
    after = {at: value for at, value in held.items() if at not in gone}
    for key, value in traverse_util.flatten_dict(dict(state)).items():
        at, like = _place(table, place, key), places.get(key)
        if like is None and at[0] in (PARAMS, OVERWRITE_WITH_GRADIENT):
            # New arrays are boxed like the first one of their table.
            like = next((there for old, there in places.items() if old[:-1] == key[:-1]), None)
        after[at] = value if like is None else nn.meta.replace_boxed(held[like], value)
    return result, traverse_util.unflatten_dict(after)


def _result_and_state(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    pair = (None, returned) if isinstance(returned, Mapping) else returned
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], Mapping):
        kinds = ", ".join(type(x).__name__ for x in (pair if type(pair) is tuple else [pair]))
        raise TypeError(f"fn: returned {kinds}; expected a state, or a result and a state.")
    return pair


def _names(table: Table) -> tuple[str, ...]:
    """The arrays of a table."""
    return (*table.spec.trained_names, *table.spec.buffers)


def _place(described: Any, path: Path, key: Path) -> Path:
    """Where an array of the state of a table or collection at ``path`` is among the variables."""
    first, *rest = key
    if isinstance(described, Table):
        return (described.spec.buffers.get(first, trained_collection(described)), *path, first)
    if first in (UPDATES, STATISTICS):
        collection = OVERWRITE_WITH_GRADIENT if first == UPDATES else STATISTICS
        return (collection, *path, *rest)
    return _place(described.tables[first], (*path, first), tuple(rest))


def _places(described: Any, path: Path, held: Mapping[Path, Any]) -> dict[Path, Path]:
    """The places of all arrays of a state, by their keys in it."""
    if isinstance(described, Table):
        places = {(name,): _place(described, path, (name,)) for name in _names(described)}
        for (name,), at in places.items():
            if at not in held:
                raise ValueError(
                    f"variables: hold no {name} at {'/'.join(path) or 'their top'} in the collection {at[0]!r}; "
                    "expected all collections of the model, e.g. {**state.variables, ...}, and in path= the names "
                    "that lead to the layer."
                )
        return places
    places = {}
    for name, table in described.tables.items():
        own = _places(table, (*path, name), held)
        places |= {(name, *key): at for key, at in own.items()}
    shared = [(UPDATES, name) for name in SHARED]
    shared += [(STATISTICS, TOTALS, name) for name in described.tables]
    return places | {key: at for key in shared if (at := _place(described, path, key)) in held}


def _check_returned(described: Any, state: Mapping[str, Any]) -> None:
    """Raises unless a state that ``fn`` returned has all arrays of its tables."""
    if not isinstance(described, Table):
        for name, table in described.tables.items():
            _check_returned(table, state.get(name, {}))
        return
    shapes = described.spec.param_shapes
    for name in _names(described):
        if name not in state or (name in shapes and jnp.shape(state[name]) != shapes[name]):
            got = f"{jnp.shape(state[name])}" if name in state else "no array"
            got = f"{got} in the state of {type_of(described)} that fn returned"
            expected = shapes.get(
                name, "the array of the state that fn was given, or its next value"
            )
            raise mismatch(f"{described.ids.label}{name}", got, expected)


def find_layers(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, nn.Module]:
    """The layers of single tables that a call of a model uses, by path, for `update_table`.

    ``model.apply`` is traced abstractly, so both ``nn.compact`` and ``setup`` are supported. The tables of an
    `EmbedCollection` are below its path.

    Args:
        model: the model, or a single layer.
        variables: all its collections.
        args, kwargs: the arguments of ``model.apply`` in the step, such as the batch, ``rngs`` or ``method``.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> from flax import linen as nn
        >>> class Model(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, ids):
        ...         cache = jax_tt.RowCache(50, ways=5)
        ...         table = jax_tt.tt_table(1000, 16, tt_ranks=4, cache=cache)
        ...         return jax_tt.linen.TableEmbed(table, name="items")(ids)
        >>> ids = jnp.array([1])
        >>> variables = Model().init(jax.random.key(0), ids)
        >>> layers = jax_tt.linen.find_layers(Model(), variables, ids)
        >>> layers["items"].table.num_embeddings
        1000
    """
    fix = "jax_tt.refresh_caches takes NNX models."
    instance_of("model", model, nn.Module, "a flax.linen module", fix)
    layers: dict[str, nn.Module] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        for layer in _looked_up(context.module, context.method_name):
            layers["/".join(layer.path)] = layer.clone(parent=None)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(partial(model.apply, variables, *args, **{**kwargs, "mutable": True}))
    return layers


def _looked_up(module: Any, method: str) -> Iterable[Any]:
    """The layers of single tables that a method of a module looks up itself, not through methods of these layers."""
    if isinstance(module, EmbedCollection):
        return () if method in ("setup", "attend", "top_k") else module.parts.values()
    return (module,) if isinstance(module, TableEmbed) and method != "setup" else ()


def refresh_caches(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Populates every row cache of a model whose ``refresh_every`` is due.

    Call it after each optimizer step, in the same ``jit``. `update_table` applies other maintenance to one layer.

    Args:
        model, args, kwargs: as in `find_layers`.
        variables: all collections of the model, including ``row_cache``.

    Returns:
        The variables, with the same structure.

    Raises:
        ValueError: the model calls no layer with a row cache on these inputs, or ``variables`` lack its variables.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> cache = jax_tt.RowCache(50, ways=5, refresh_every=2)
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.tt_table(1000, 8, tt_ranks=4, cache=cache))
        >>> ids = jnp.array([1, 2, 3])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> for step in range(2):
        ...     _, counted = layer.apply(variables, ids, mutable=["row_cache"])
        ...     variables = jax_tt.linen.refresh_caches(layer, {**variables, **counted}, ids)
        >>> statistics, _ = jax_tt.linen.update_table(
        ...     layer, variables, lambda table, state: (jax_tt.cache.statistics(table, state), state)
        ... )
        >>> statistics["occupied"]
        3
    """
    layers: dict[str, Any] = find_layers(model, variables, *args, **kwargs)
    cached = {path: layer for path, layer in layers.items() if has_cache(layer._described())}
    if not cached:
        got = f"{type(model).__name__}, which calls no layer with a row cache on these inputs"
        raise mismatch("model", got, "one that was built with cache=jax_tt.RowCache(capacity=...)")
    changed = dict(variables)
    for path, layer in cached.items():
        method = layer.lookup.method

        def refresh(table: Table, state: State, path: str = path, method: str = method) -> Any:
            if state[DIRECTORY[0]].ndim != 2:
                got = f"{path} inside nn.scan or nn.vmap, which stack its variables"
                raise mismatch("model", got, "a layer with a row cache outside of them")
            return maintain(table, state, method)

        _, changed = update_table(layer, changed, refresh, path=path)
    return changed
