"""Insertion, removal and growth of the hash tables of linen models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optax
from flax import linen as nn

from jax_tt._collection import insertion
from jax_tt._collection.collection import Collection
from jax_tt._kinds.hashed.change import grown_capacity, growth_to
from jax_tt._kinds.hashed.table import HashTable, require_hash_table, unsharded_hash_table
from jax_tt._layers import change as _change
from jax_tt._layers.linen.change import ChangedTable, check_optax, rule_at
from jax_tt._layers.linen.collection import EmbedCollection
from jax_tt._layers.linen.table import AnyTable
from jax_tt._layers.linen.variables import PARAMS, TableVariables
from jax_tt._ops import insert as hash_insert
from jax_tt._ops import remove as hash_remove
from jax_tt._ops.inserting import Evicted, Inserted
from jax_tt._planning.shard_tables import over_mesh
from jax_tt._table.change import grow


def insert_keys(
    layer: nn.Module,
    variables: Mapping[str, Any],
    ids: Any,
    *,
    path: Sequence[str] = (),
    **options: Any,
) -> tuple[Inserted, dict[str, Any]]:
    """Finds or inserts the keys of a batch, as `jax_tt.insert_keys` does, and returns new variables.

    Args:
        layer: the `TableEmbed` or `TableEmbedBag` of a `HashTable`.
        variables: all collections of the model.
        ids: keys, or `Bags` of them.
        path: path of the layer in the collections; empty if the layer is the model.
        **options: ``scores``, ``epoch``, ``method`` and ``return_evicted`` of `jax_tt.insert_keys`.

    Returns:
        `Inserted`, and the variables.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.hash_table(1024, 16))
        >>> keys = np.array([2**63 - 1, -5])
        >>> variables = layer.init(jax.random.key(0), keys)
        >>> inserted, variables = jax_tt.linen.insert_keys(layer, variables, keys)
        >>> int(inserted.counts["inserted"]), layer.apply(variables, keys).shape
        (2, (2, 16))
    """
    table = _table(layer, path)
    own = TableVariables(variables, tuple(path), table)
    inserted, state = hash_insert.insert_keys(table, own.values, ids, **options)
    return inserted, own.replaced(state, table)


def insert_collection_keys(
    layer: EmbedCollection,
    variables: Mapping[str, Any],
    batch: Any,
    *,
    path: Sequence[str] = (),
    **options: Any,
) -> tuple[dict[str, Inserted], dict[str, Any]]:
    """Finds or inserts the keys of a batch, as `jax_tt.insert_collection_keys` does, and returns new variables.

    Args:
        layer: the `EmbedCollection`.
        variables, path: as in `insert_keys`.
        batch: as the layer takes it.
        **options: ``scores``, ``epoch``, ``method`` and ``return_evicted`` of `jax_tt.insert_collection_keys`.

    Returns:
        `Inserted` by hash table, and the variables.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.EmbedCollection(
        ...     {"item": jax_tt.hash_table(1024, 16)}, {"seen": jax_tt.Feature("item")}
        ... )
        >>> batch = {"seen": np.array([[2**62, -5], [3, 3]])}
        >>> variables = layer.init(jax.random.key(0), batch)
        >>> inserted, variables = jax_tt.linen.insert_collection_keys(layer, variables, batch)
        >>> int(inserted["item"].counts["inserted"]), layer.apply(variables, batch)["seen"].shape
        (3, (2, 16))
    """
    collection = Collection(_tables(layer), layer.features)
    hashed = {name: table for name, table in collection.tables.items() if table.ids.takes_keys}
    state = {
        name: TableVariables(variables, (*path, name), table).values
        for name, table in hashed.items()
    }
    inserted, state = insertion.insert_collection_keys(collection, state, batch, **options)
    after = dict(variables)
    for name, table in hashed.items():
        after = TableVariables(after, (*path, name), table).replaced(state[name], table)
    return inserted, after


def grow_if_full(
    layer: nn.Module,
    variables: Mapping[str, Any],
    *,
    max_load: float = 0.75,
    path: Sequence[str] = (),
    tx: optax.GradientTransformation | None = None,
    opt_state: Any = None,
) -> ChangedTable:
    """Doubles the capacity of hash tables whose load exceeds a limit, as `jax_tt.grow_if_full` does.

    Args:
        layer: the `TableEmbed` or `TableEmbedBag` of a `HashTable`, or an `EmbedCollection`.
        variables, path: as in `insert_keys`.
        max_load: the share of occupied slots above which a table grows.
        tx, opt_state: the transformation and state of ``variables["params"]``, if optax updates tables.

    Returns:
        `ChangedTable`, whose layer has the new capacities; as they were if no table has grown.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.hash_table(64, 16, max_capacity=256))
        >>> variables = layer.init(jax.random.key(0), np.arange(4))
        >>> _, variables = jax_tt.linen.insert_keys(layer, variables, np.arange(40))
        >>> changed = jax_tt.linen.grow_if_full(layer, variables, max_load=0.5)
        >>> changed.layer.table.num_embeddings, changed.variables["params"]["embedding"].shape
        (128, (128, 16))
    """
    check_optax(tx, opt_state, variables)
    if isinstance(layer, EmbedCollection):
        tables = {(*path, n): t for n, t in _tables(layer).items() if t.ids.takes_keys}
    else:
        tables = {tuple(path): _table(layer, path)}
    after, rules, larger = dict(variables), {}, {}
    for place, table in tables.items():
        own, whole = TableVariables(after, place, table), unsharded_hash_table(table)
        capacity = grown_capacity(whole, own.values, max_load)
        if capacity > whole.num_embeddings:
            change = grow(table, own.values, growth_to(whole, capacity))
            after, rules[place] = own.replaced(change.state, change.table), change.carry
            larger[place] = change.table.unsharded
    if tx is not None and larger:
        opt_state = _change.carried(tx, opt_state, after[PARAMS], rule_at(rules))
    if isinstance(layer, EmbedCollection):
        new = {name: larger.get((*path, name), table) for name, table in layer.tables.items()}
        layer = layer.clone(tables=new)
    elif isinstance(layer, AnyTable) and larger:
        layer = layer.clone(table=larger[tuple(path)].with_name(layer.table.name))
    return ChangedTable(layer, after, opt_state, None)


def remove_keys(
    layer: nn.Module,
    variables: Mapping[str, Any],
    keys: Any = None,
    *,
    path: Sequence[str] = (),
    **options: Any,
) -> tuple[Evicted, dict[str, Any]]:
    """Takes keys out of a table, as `jax_tt.remove_keys` does, and returns new variables.

    Args:
        layer, variables, path: as in `insert_keys`.
        keys: keys to remove, or None.
        **options: ``where``, ``size`` and ``method`` of `jax_tt.remove_keys`.

    Returns:
        The `Evicted` keys, and the variables.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.hash_table(1024, 16))
        >>> keys = np.array([8, 9])
        >>> variables = layer.init(jax.random.key(0), keys)
        >>> _, variables = jax_tt.linen.insert_keys(layer, variables, keys)
        >>> gone, variables = jax_tt.linen.remove_keys(layer, variables, np.array([9]))
        >>> gone.keys.tolist()
        [[0, 9]]
    """
    table = _table(layer, path)
    own = TableVariables(variables, tuple(path), table)
    gone, state = hash_remove.remove_keys(table, own.values, keys, **options)
    return gone, own.replaced(state, table)


def _tables(layer: Any) -> dict[str, Any]:
    if not isinstance(layer, EmbedCollection):
        raise TypeError(
            f"layer: got a {type(layer).__name__}; expected a jax_tt.linen.EmbedCollection."
        )
    return dict(over_mesh(layer.tables, layer.mesh, layer.axis, layer.placement, layer.exchange))


def _table(layer: Any, path: Sequence[str]) -> HashTable:
    if not isinstance(layer, AnyTable):
        raise TypeError(
            f"layer: got a {type(layer).__name__}; expected the jax_tt.linen.TableEmbed or TableEmbedBag of a "
            "HashTable."
        )
    table = require_hash_table(layer.table)
    return table if table.name is not None else table.with_name("/".join(path) or None)
