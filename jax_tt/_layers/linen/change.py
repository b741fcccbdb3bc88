"""Reordering and growing a table in linen: its collections and their optax state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import optax
from flax import linen as nn

from jax_tt._ids.id_order import IdOrder
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._layers import change as _change
from jax_tt._layers.linen.tt import TTLayer
from jax_tt._layers.linen.variables import PARAMS, TableVariables
from jax_tt._sets.row_cache import RowCache
from jax_tt._table.change import Carry, Change, Growth, with_cache
from jax_tt._table.table import Table
from jax_tt._table.types import State
from jax_tt._tt.approximation import Approximation
from jax_tt._tt.initial_cores import fresh_init


class ChangedTable(NamedTuple):
    """A layer after `reorder_table`, `grow_table`, `grow_if_full` or `resize_cache`.

    Attributes:
        layer: the module with its new sizes, order and cache; a model must build its layer with these:
            ``layer.num_embeddings``, ``layer.row_factors``, and so on, or ``layer.table`` and ``layer.tables``.
        variables: all variables of the model.
        opt_state: the optax state of ``variables["params"]``, or None if none was given.
        found: `tt.Approximation` from `reorder_table`; otherwise None.

    >>> import jax, jax.numpy as jnp, jax_tt.linen
    >>> layer = jax_tt.linen.TTEmbed(1000, 8, tt_ranks=4)
    >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
    >>> changed = jax_tt.linen.grow_table(layer, variables, 1200, key=jax.random.key(1))
    >>> changed.layer.row_factors, changed.found
    ((12, 10, 10), None)
    """

    layer: Any
    variables: dict[str, Any]
    opt_state: Any
    found: Approximation | None


def reorder_table(
    layer: TTLayer,
    variables: Mapping[str, Any],
    id_order: IdOrder,
    *,
    path: Sequence[str] = (),
    tx: optax.GradientTransformation | None = None,
    opt_state: Any = None,
    **options: Any,
) -> ChangedTable:
    """Changes the order of ids of a table as `jax_tt.TTEmbed.reorder` does, but returns new variables.

    Args:
        layer: the `TTEmbed` or `TTEmbedBag`.
        variables: all collections of the model.
        id_order: `IdOrder` of ``num_embeddings`` ids.
        path: path of the layer in the collections; empty if the layer is the model.
        tx, opt_state: the transformation and state of ``variables["params"]``, if optax updates this table.
        **options: ``ranks``, ``shape``, ``tolerance`` and the other arguments of `tt.reorder` except ``dtype``.

    Returns:
        `ChangedTable`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen, numpy as np
        >>> layer = jax_tt.linen.TTEmbed(1000, 8, tt_ranks=4, row_factors=(10, 10, 10))
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> order = jax_tt.order.IdOrder(np.arange(1000)[::-1])
        >>> changed = jax_tt.linen.reorder_table(layer, variables, order)
        >>> row = changed.layer.apply(changed.variables, jnp.array([7]))
        >>> bool(jnp.allclose(row, layer.apply(variables, jnp.array([7])), atol=1e-6))
        True
    """

    def change(table: Table, state: State) -> Change:
        return _change.reordered(table, state, id_order, options)

    return _changed(layer, variables, tuple(path), tx, opt_state, change)


def grow_table(
    layer: TTLayer,
    variables: Mapping[str, Any],
    num_embeddings: int,
    *,
    key: jax.Array,
    like: Any = None,
    path: Sequence[str] = (),
    tx: optax.GradientTransformation | None = None,
    opt_state: Any = None,
) -> ChangedTable:
    """Adds rows to a table as `jax_tt.TTEmbed.grow` does, but returns new variables.

    Args:
        layer, variables, path, tx, opt_state: as in `reorder_table`.
        num_embeddings: the new number of ids, at least the present one.
        key: for the initialisation of appended slices.
        like: one id, or one for every new id; the new rows start near the rows of these ids.

    Returns:
        `ChangedTable`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 8, tt_ranks=4)
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> changed = jax_tt.linen.grow_table(layer, variables, 1200, key=jax.random.key(1))
        >>> changed.layer.apply(changed.variables, jnp.array([999, 1199])).shape
        (2, 8)
    """

    init = fresh_init(layer.core_init)
    slice_init = (lambda *args: nn.meta.unbox(init(*args))) if callable(init) else init

    def change(table: Table, state: State) -> Change:
        growth = Growth(num_embeddings, key, slice_init, like, layer.method)
        return _change.grown(table, state, growth)

    return _changed(layer, variables, tuple(path), tx, opt_state, change)


def resize_cache(
    layer: TTLayer,
    variables: Mapping[str, Any],
    cache: RowCache,
    *,
    path: Sequence[str] = (),
    tx: optax.GradientTransformation | None = None,
    opt_state: Any = None,
) -> ChangedTable:
    """Changes the row cache of a table as `jax_tt.TTEmbed.resize_cache` does, but returns new variables.

    Args:
        layer, variables, path, tx, opt_state: as in `reorder_table`.
        cache: the new `RowCache`, with the same ``gradients``.

    Returns:
        `ChangedTable`.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 8, cache=jax_tt.RowCache(50, ways=5))
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> changed = jax_tt.linen.resize_cache(layer, variables, jax_tt.RowCache(100, ways=5))
        >>> changed.variables["params"]["cache_rows"].shape, changed.layer.cache.capacity
        ((100, 8), 100)
    """

    def change(table: Table, state: State) -> Change:
        return with_cache(table, state, cache, layer.method)

    return _changed(layer, variables, tuple(path), tx, opt_state, change)


def _changed(
    layer: TTLayer,
    variables: Mapping[str, Any],
    path: tuple[str, ...],
    tx: Any,
    opt_state: Any,
    change: Callable[[Table, State], Change],
) -> ChangedTable:
    check_optax(tx, opt_state, variables)
    before = layer._describe()[0]
    own = TableVariables(variables, path, before)
    after, state, carry, found = change(before, own.values)
    if tx is not None and layer.optimizer is None:
        _change.check_cores("opt_state", before, after)
    new = own.replaced(state, after)
    if tx is not None:
        opt_state = _change.carried(tx, opt_state, new[PARAMS], rule_at({path: carry}))
    train = cast(TTTable, after.innermost)
    changed = layer.clone(
        **train.shape.layer_arguments(),
        id_order=after.id_order,
        cache=None if after.cached is None else after.cached.cache,
        core_init=train.core_init,
    )
    return ChangedTable(changed, new, opt_state, found)


def check_optax(tx: Any, opt_state: Any, variables: Mapping[str, Any]) -> None:
    """Raises unless the state is that of the transformation for these variables, or both are None."""
    if (tx is None) != (opt_state is None):
        raise ValueError("tx, opt_state: got one of them; expected both or neither.")
    if tx is not None:
        _change.check_state("opt_state", tx, opt_state, variables[PARAMS], "variables['params']")


def rule_at(rules: Mapping[tuple[str, ...], Mapping[str, Carry]]) -> Any:
    """The rules for the state of parameters, of tables by path and of their arrays by name."""

    def rule(keys: Any) -> Carry | None:
        names = tuple(key.key for key in keys if isinstance(key, jax.tree_util.DictKey))
        return rules.get(names[:-1], {}).get(names[-1])

    return rule
