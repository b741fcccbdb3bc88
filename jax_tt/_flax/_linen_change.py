"""The linen half of reordering and growing a table: its collections, and the state that optax keeps for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from flax import linen as nn

from jax_tt._algebra.approximation import TTApproximation
from jax_tt._cache.cached import ROWS
from jax_tt._cache.config import RowCache
from jax_tt._flax import _change
from jax_tt._flax._linen_tt import TTLayer
from jax_tt._flax._linen_variables import PARAMS, TableVariables
from jax_tt._init import fresh_init
from jax_tt.order import IdOrder
from jax_tt.order._ordered import ID_ORDER
from jax_tt.order._stored import on_device

# The table afterwards, and by variable name what becomes of the state that optax has for it.
_Change = tuple[_change.Layer, Mapping[str, _change.Carry]]


class ChangedTable(NamedTuple):
    """A layer after `reorder_table`, `grow_table` or `resize_cache`.

    Attributes:
        layer: the module with its new sizes, order and cache; inside a model, give these to the layer there:
            ``layer.num_embeddings``, ``layer.row_factors``, and so on.
        variables: all variables of the model.
        opt_state: state of optax for ``variables["params"]``, or None where none was given.
        found: `TTApproximation` of a table that was reordered; None of the others.

    >>> import jax, jax.numpy as jnp, jax_tt.linen
    >>> layer = jax_tt.linen.TTEmbed(1000, 8, tt_ranks=4)
    >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
    >>> changed = jax_tt.linen.grow_table(layer, variables, 1200, key=jax.random.key(1))
    >>> changed.layer.row_factors, changed.found
    ((12, 10, 10), None)
    """

    layer: TTLayer
    variables: dict[str, Any]
    opt_state: Any
    found: TTApproximation | None


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
    """A table under another order of ids, as `jax_tt.TTEmbed.reorder`, without changing the variables given.

    Args:
        layer: the `TTEmbed` or `TTEmbedBag`.
        variables: of the model, all collections.
        id_order: `IdOrder` of ``num_embeddings`` ids.
        path: names that lead to the layer in the collections; none where it is the model.
        tx, opt_state: of ``variables["params"]``, where optax steps this table.
        **options: ``ranks``, ``shape``, ``tolerance`` and the others of `tt_reorder` but ``dtype``.

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
    found = None

    def change(table: _change.Layer) -> _Change:
        nonlocal found
        names = (*table.train.param_names, ROWS)
        table, found = _change.reordered(table, id_order, options)
        return table, dict.fromkeys(names, _change.restarted)

    changed = _changed(layer, variables, tuple(path), tx, opt_state, change)
    return changed._replace(found=found)


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
    """A table with more rows, as `jax_tt.TTEmbed.grow`, without changing the variables given.

    Args:
        layer, variables, path, tx, opt_state: as in `reorder_table`.
        num_embeddings: number of ids to come, at least those there are.
        key: of the appended slices.
        like: ints, one id or one for every new id, of ids that the new ones start near.

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

    def change(table: _change.Layer) -> _Change:
        table, carry = _change.grown(table, num_embeddings, key, slice_init, like, layer.method)
        return table, {table.train.param_names[0]: _change.extended, ROWS: carry}

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
    """A table with another row cache, as `jax_tt.TTEmbed.resize_cache`, without changing the variables given.

    Args:
        layer, variables, path, tx, opt_state: as in `reorder_table`.
        cache: the `RowCache` to have; of the same ``gradients``.

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

    def change(table: _change.Layer) -> _Change:
        table, carry = _change.with_cache(table, cache, layer.method)
        return table, {ROWS: carry}

    return _changed(layer, variables, tuple(path), tx, opt_state, change)


def _changed(
    layer: TTLayer,
    variables: Mapping[str, Any],
    path: tuple[str, ...],
    tx: Any,
    opt_state: Any,
    change: Callable[[_change.Layer], _Change],
) -> ChangedTable:
    if (tx is None) != (opt_state is None):
        raise ValueError("tx, opt_state: got one of them; expected both or neither.")
    if tx is not None:
        _change.check_state("opt_state", tx, opt_state, variables[PARAMS], "variables['params']")
    described = layer._describe()[0]
    own = TableVariables(variables, path, described)
    values = dict(own.values)
    rows = values.pop(ID_ORDER, None)
    before = _change.Layer(described, values, None if rows is None else IdOrder(rows))
    after, rules = change(before)
    if tx is not None and layer.optimizer is None and after.shape.d != before.shape.d:
        raise ValueError(_change.other_cores("opt_state", before.shape, after.shape))
    values = dict(after.values)
    if after.id_order is not None:
        values[ID_ORDER] = on_device(after.id_order.rows)
    new = own.replaced(values, after.table)
    if tx is not None:
        opt_state = _change.carried(tx, opt_state, new[PARAMS], _rule_at(path, rules))
    changed = layer.clone(
        **after.shape.layer_arguments(),
        id_order=after.id_order,
        cache=after.cache,
        # Cores that were given are those of the table before the change.
        core_init=fresh_init(layer.core_init),
    )
    return ChangedTable(changed, new, opt_state, None)


def _rule_at(path: tuple[str, ...], rules: Mapping[str, _change.Carry]) -> Any:
    def rule(keys: Any) -> _change.Carry | None:
        names = tuple(key.key for key in keys if isinstance(key, jax.tree_util.DictKey))
        return rules.get(names[-1]) if names[:-1] == path else None

    return rule
