"""Parts of arrays that several tables share, in place of arrays of a table.

Native ops take parts where they are. Functions of JAX and their operands have the array once, as `detached` gives it,
so that no table has a cotangent of the whole array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeGuard, TypeVar

import jax
from jax import lax
from jax.core import Tracer

Tree = TypeVar("Tree")
# A shared array: the names of what has it, such as a stack, and of the array.
Key = tuple[str, str]
SharedArrays = Mapping[Key, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A part of an array.

    Attributes:
        array: the shared one; None where it is detached.
        key, first, count: static; the part begins at ``first``.
    """

    array: Any
    key: Key = dataclasses.field(metadata={"static": True})
    first: int = dataclasses.field(metadata={"static": True})
    count: int = dataclasses.field(metadata={"static": True})

    def of(self, array: Any) -> Self:
        """The same part of another array."""
        return dataclasses.replace(self, array=array)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StackRows(Part):
    """Rows ``[first, first + count)`` of an array of a stack, which has the rows of several tables.

    Attributes:
        axis: of the rows; those before it are of the models whose states are stacked.
    """

    axis: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.array.shape
        return (*shape[: self.axis], self.count, *shape[self.axis + 1 :])

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def taken(self) -> jax.Array:
        """The rows on their own, which are copied."""
        if isinstance(self.array, Tracer):
            return lax.slice_in_dim(self.array, self.first, self.first + self.count, axis=self.axis)
        # Outside of programs, static bounds would be compiled for every table.
        return lax.dynamic_slice_in_dim(self.array, self.first, self.count, axis=self.axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FlatBags(Part):
    """What bags ``[first, first + count)`` have in an array of the bags of many features: ids, offsets or weights."""


def is_part(leaf: Any) -> TypeGuard[Part]:
    return isinstance(leaf, Part)


def is_rows(leaf: Any) -> TypeGuard[StackRows]:
    return isinstance(leaf, StackRows)


def detached(tree: Tree) -> tuple[Tree, dict[Key, Any]]:
    """The tree with parts without arrays, and each of these arrays, once."""
    shared: dict[Key, Any] = {}

    def detach(leaf: Any) -> Any:
        if not is_part(leaf):
            return leaf
        shared.setdefault(leaf.key, leaf.array)
        return leaf.of(None)

    return jax.tree.map(detach, tree, is_leaf=is_part), shared


def attached(tree: Tree, shared: SharedArrays) -> Tree:
    """The inverse of `detached`."""

    def attach(leaf: Any) -> Any:
        return leaf.of(shared[leaf.key]) if is_part(leaf) else leaf

    return jax.tree.map(attach, tree, is_leaf=is_part) if shared else tree


def taken(tree: Tree) -> Tree:
    """The tree with rows on their own."""
    return jax.tree.map(lambda x: x.taken() if is_rows(x) else x, tree, is_leaf=is_part)


def in_place_of(old: Any, new: Any) -> Any:
    """New values of an array, or of rows of a stack, which have them in a copy of it then."""
    if not is_rows(old):
        return new
    return old.of(lax.dynamic_update_slice_in_dim(old.array, new, old.first, old.axis))


def neighbours_joined(leaves: Sequence[Any]) -> list[Any]:
    """The leaves with rows that follow each other in one array as one leaf, which is taken at once."""
    found: list[Any] = []
    for leaf in leaves:
        last = found[-1] if found else None
        if not (is_rows(leaf) and is_rows(last) and leaf.array is last.array):
            found.append(leaf)
        elif last.first + last.count == leaf.first:
            found[-1] = dataclasses.replace(last, count=last.count + leaf.count)
        else:
            found.append(leaf)
    return found


def merged(parts: Sequence[tuple[StackRows, Any]]) -> Any:
    """The array of a stack with new values in some of its rows: arrays, or `StackRows` of what a native op returned."""
    array = parts[0][0].array
    changed = [
        (rows, value) for rows, value in parts if not is_rows(value) or value.array is not array
    ]
    found = {id(value.array): value.array for _, value in changed if is_rows(value)}
    if len(found) == 1 and all(is_rows(value) for _, value in changed):
        (array,) = found.values()  # one call has changed all of them in place
        return array
    for rows, value in changed:
        own: Any = value.taken() if is_rows(value) else value
        array = lax.dynamic_update_slice_in_dim(array, own, rows.first, 0)
    return array


def restacked(before: Tree, after: Tree) -> tuple[Tree, dict[Key, Any]]:
    """`detached` of arrays ``after`` where ``before`` has rows of stacks in their places."""
    olds, structure = jax.tree.flatten(before, is_leaf=is_rows)
    parts: dict[Key, list[tuple[StackRows, Any]]] = {}
    leaves = []
    for old, new in zip(olds, structure.flatten_up_to(after), strict=True):
        if is_rows(old):
            parts.setdefault(old.key, []).append((old, new))
        leaves.append(old.of(None) if is_rows(old) else new)
    stacks = {key: merged(of_stack) for key, of_stack in parts.items()}
    return jax.tree.unflatten(structure, leaves), stacks
