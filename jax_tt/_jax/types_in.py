"""Types in place of arrays, for what programs keep."""

from __future__ import annotations

from typing import Any

import jax


def types_in(tree: Any) -> Any:
    """A tree with types in place of its arrays, and dicts in their order.

    Programs keep the rules of their calls, and what these close over. Traced values there would outlive their trace.
    """
    if isinstance(tree, jax.Array):
        return jax.typeof(tree)
    if isinstance(tree, dict):  # whose items jax.tree.map would sort
        return {name: types_in(value) for name, value in tree.items()}
    return jax.tree.map(
        lambda leaf: leaf if leaf is tree else types_in(leaf),
        tree,
        is_leaf=lambda node: isinstance(node, dict),
    )
