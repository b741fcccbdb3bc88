"""Changes of the table of a layer and of its optax state: code shared by NNX and linen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_tt._base.arguments import as_int
from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._kinds.ordered.table import check_id_order
from jax_tt._table.change import Carry, Change, Growth, Orders, grow, reorder, under_order
from jax_tt._table.table import Table
from jax_tt._table.types import State


def reordered(table: Table, state: State, id_order: IdOrder, options: Mapping[str, Any]) -> Change:
    """The table under another order."""
    if id_order is None:
        raise TypeError(
            "id_order: got None; expected a jax_tt.order.IdOrder, e.g. IdOrder.identity(num_embeddings) where ids are "
            "to be rows."
        )
    check_id_order(id_order, table.num_embeddings)
    if "dtype" in options:
        raise TypeError(
            f"dtype: got {options['dtype']!r}; a layer keeps its param_dtype. Give the cores of tt.reorder to a "
            "layer of another one."
        )
    change = reorder(table, state, Orders(id_order, options))
    return change if ID_ORDER in table.buffers else under_order(change.table, change, id_order)


def grown(table: Table, state: State, growth: Growth) -> Change:
    """The table with more rows."""
    if growth.like is not None:
        count = as_int("num_embeddings", growth.num_embeddings) - table.num_embeddings
        _check_like(growth.like, count, table.num_embeddings)
    return grow(table, state, growth)


def check_cores(name: str, old: Table, new: Table) -> None:
    """Raises for a change of the number of cores, which optax state cannot follow."""
    before, after = len(old.innermost.param_shapes), len(new.innermost.param_shapes)
    if before != after:
        raise ValueError(
            f"{name}: got the state of a table of {before} cores, which would have {after}; expected as many, or "
            f"{name}=None and an optimizer that is made anew afterwards."
        )


def check_state(
    name: str, tx: optax.GradientTransformation, state: Any, params: Any, whose: str
) -> None:
    """Raises if the optax state does not belong to these parameters."""
    want = jax.eval_shape(tx.init, params)
    if jax.tree.map(jnp.shape, want) != jax.tree.map(jnp.shape, state):
        raise ValueError(
            f"{name}: holds state of other parameters than those of {whose}; expected what was made for these."
        )


def carried(
    tx: optax.GradientTransformation, state: Any, params: Any, carry: Callable[[Any], Carry | None]
) -> Any:
    """The optax state after cores among its parameters have changed.

    Args:
        tx: the transformation.
        state: its state before the change.
        params: the parameters after the change, with the structure that ``state`` was made for.
        carry: maps the key path of a parameter to the rule for its state, or to None if the parameter has not changed.
    """

    def keep(old: Any, fresh: Any) -> Any:
        del fresh
        return old

    def masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    rules = jax.tree_util.tree_map_with_path(lambda path, _: carry(path) or keep, params)
    # Transformations of some of the parameters, as in `optax.multi_transform`, have masked nodes for the others.
    by_leaf = optax.tree_utils.tree_map_params(
        tx,
        lambda old, rule: old if masked(old) else rule,
        state,
        rules,
        transform_non_params=lambda _: keep,
        is_leaf=masked,
    )
    by_leaf = jax.tree.leaves(by_leaf)
    leaves, structure = jax.tree.flatten(state)
    changing = [i for i, rule in enumerate(by_leaf) if rule is not keep]

    # Compiled, so that only the parts of the fresh state that rules use are allocated.
    @jax.jit
    def changed(old: list[Any], params: Any) -> list[Any]:
        fresh = jax.tree.leaves(tx.init(params))
        return [by_leaf[i](leaf, fresh[i]) for i, leaf in zip(changing, old, strict=True)]

    new = changed([leaves[i] for i in changing], params)
    for i, leaf in zip(changing, new, strict=True):
        leaves[i] = leaf
    return structure.unflatten(leaves)


def _check_like(like: Any, count: int, num_embeddings: int) -> None:
    """Raises unless ``like`` holds existing ids, one or as many as there are new ids."""
    ids = np.asarray(like)
    if ids.dtype.kind not in "iu" or ids.shape not in ((), (count,)):
        raise ValueError(
            f"like: got {ids.dtype} of shape {ids.shape}; expected an id, or one for each of the {count} new ids."
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < num_embeddings:
        raise ValueError(
            f"like: got ids {int(ids.min())} to {int(ids.max())}; expected 0 to {num_embeddings - 1}, those the table "
            "has."
        )
