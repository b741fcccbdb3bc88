"""Types in place of arrays, for what programs keep."""

from __future__ import annotations

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def types_in(tree: Tree) -> Tree:
    """A tree with types in place of its arrays, and dicts in their order.

    Programs keep the rules of their calls, and what these close over. Traced values there would outlive their trace.
    """

    def of(leaf: object) -> object:
        if isinstance(leaf, dict):  # whose items jax.tree.map would sort
            return {name: types_in(value) for name, value in leaf.items()}
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf

    return jax.tree.map(of, tree, is_leaf=lambda node: isinstance(node, dict))
