"""Insertion, removal and growth of the hash tables of linen models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flax import linen as nn

from jax_tt._flax._linen_table import AnyTable
from jax_tt._flax._linen_variables import TableVariables
from jax_tt._hash import insert as hash_insert
from jax_tt._hash import remove as hash_remove
from jax_tt._hash.insert import Evicted, Inserted
from jax_tt._hash.table import HashTable, require_hash_table


def insert_keys(
    layer: nn.Module,
    variables: Mapping[str, Any],
    ids: Any,
    *,
    path: Sequence[str] = (),
    **options: Any,
) -> tuple[dict[str, Any], Inserted]:
    """Finds or inserts the keys of a batch, as `jax_tt.insert_keys` does, and returns new variables.

    Args:
        layer: the `TableEmbed` or `TableEmbedBag` of a `HashTable`.
        variables: all collections of the model.
        ids: keys, or `Bags` of them.
        path: path of the layer in the collections; empty if the layer is the model.
        **options: ``scores``, ``epoch``, ``method`` and ``return_evicted`` of `jax_tt.insert_keys`.

    Returns:
        The variables, and `Inserted`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.hash_table(16, 1024))
        >>> keys = np.array([2**63 - 1, -5])
        >>> variables = layer.init(jax.random.key(0), keys)
        >>> variables, inserted = jax_tt.linen.insert_keys(layer, variables, keys)
        >>> int(inserted.counts["inserted"]), layer.apply(variables, keys).shape
        (2, (2, 16))
    """
    table = _table(layer, path)
    own = TableVariables(variables, tuple(path), table)
    state, inserted = hash_insert.insert_keys(table, own.values, ids, **options)
    return own.replaced(state, table), inserted


def remove_keys(
    layer: nn.Module,
    variables: Mapping[str, Any],
    keys: Any = None,
    *,
    path: Sequence[str] = (),
    **options: Any,
) -> tuple[dict[str, Any], Evicted]:
    """Takes keys out of a table, as `jax_tt.remove_keys` does, and returns new variables.

    Args:
        layer, variables, path: as in `insert_keys`.
        keys: keys to remove, or None.
        **options: ``where``, ``size`` and ``method`` of `jax_tt.remove_keys`.

    Returns:
        The variables, and the `Evicted` keys.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and the fix.

    Example:
        >>> import jax, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.TableEmbed(jax_tt.hash_table(16, 1024))
        >>> keys = np.array([8, 9])
        >>> variables = layer.init(jax.random.key(0), keys)
        >>> variables, _ = jax_tt.linen.insert_keys(layer, variables, keys)
        >>> variables, gone = jax_tt.linen.remove_keys(layer, variables, np.array([9]))
        >>> gone.keys.tolist()
        [[0, 9]]
    """
    table = _table(layer, path)
    own = TableVariables(variables, tuple(path), table)
    state, gone = hash_remove.remove_keys(table, own.values, keys, **options)
    return own.replaced(state, table), gone


def _table(layer: Any, path: Sequence[str]) -> HashTable:
    if not isinstance(layer, AnyTable):
        raise TypeError(
            f"layer: got a {type(layer).__name__}; expected the jax_tt.linen.TableEmbed or TableEmbedBag of a "
            "HashTable."
        )
    table = require_hash_table(layer.table)
    return table if table.name is not None else table.with_name("/".join(path) or None)
