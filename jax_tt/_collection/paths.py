"""Leaves of trees by path."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

# Names that lead to an array or to the arrays of a table, without the types of the containers.
Path = tuple[str, ...]


def by_path(tree: Any) -> dict[Path, Any]:
    """The leaves of a tree by path, in their order; a variable of Flax is what it holds."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    within = Counter(keys[:k] for keys, _ in leaves for k in range(len(keys)))
    value = jax.tree_util.GetAttrKey("value")
    return {
        tuple(
            jax.tree_util.keystr((key,), simple=True)
            for key in (keys[:-1] if keys[-1:] == (value,) and within[keys[:-1]] == 1 else keys)
        ): leaf
        for keys, leaf in leaves
    }


def nested(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The inverse of `by_path`, in dicts."""
    tree: dict[str, Any] = {}
    for (*place, name), leaf in leaves.items():
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), place, tree)[name] = leaf
    return tree


def ends(path: Any) -> list[Path]:
    """The ends of a path, the longest one first."""
    return [tuple(path[k:]) for k in range(len(path) + 1)]


def named(argument: str, path: Path) -> str:
    """A path in an error message."""
    return argument + "".join(f"[{name!r}]" for name in path)
