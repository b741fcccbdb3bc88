"""The optax state of a table that has changed: code shared by NNX and linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_tt._base.arguments import mismatch
from jax_tt._table.change import Carry
from jax_tt._table.table import Table
from jax_tt._table.wrapper import innermost


def check_cores(name: str, old: Table, new: Table) -> None:
    """Raises for a change of the number of cores, which optax state cannot follow."""
    before, after = len(innermost(old).spec.param_shapes), len(innermost(new).spec.param_shapes)
    if before != after:
        got = f"the state of a table of {before} cores, which would have {after}"
        expected = f"as many, or {name}=None and an optimizer that is made anew afterwards"
        raise mismatch(name, got, expected)


def check_state(
    name: str, tx: optax.GradientTransformation, state: Any, params: Any, whose: str
) -> None:
    """Raises if the optax state does not belong to these parameters."""
    want = jax.eval_shape(tx.init, params)
    if jax.tree.map(jnp.shape, want) != jax.tree.map(jnp.shape, state):
        got = f"state of other parameters than {whose} has"
        raise mismatch(name, got, "what was made for these")


def carried(
    tx: optax.GradientTransformation, state: Any, params: Any, carry: Callable[[Any], Carry | None]
) -> Any:
    """The optax state after cores among its parameters have changed.

    ``state`` is the state before the change, ``params`` are the parameters after it. ``carry`` maps the key path of a
    parameter to the rule for its state, or to None if the parameter has not changed.
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
