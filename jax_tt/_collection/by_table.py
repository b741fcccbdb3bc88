"""Arrays that tables share, by table: checkpoints have those of every table under its name, whatever holds them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import mismatch
from jax_tt._collection.collection import Collection
from jax_tt._collection.paths import Path, ends, named


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of an array that several tables share, one after another along its first axis.

    Attributes:
        shape: of the array.
        paths: where checkpoints have the parts; None for a part of zeros that they do not have.
        rows: of every part; None for one entry, without the first axis.
    """

    shape: tuple[int, ...]
    paths: tuple[Path | None, ...]
    rows: tuple[int | None, ...]

    def within(self, place: Path) -> Parts:
        """The same parts in a tree at a path."""
        paths = tuple(path and (*place, *path) for path in self.paths)
        return dataclasses.replace(self, paths=paths)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a state has elsewhere than its checkpoints.

    Attributes:
        parts: of the arrays that tables share, by path.
        moved: paths of checkpoints by path, of all that is under these.
    """

    parts: Mapping[Path, Parts] = dataclasses.field(default_factory=dict)
    moved: Mapping[Path, Path] = dataclasses.field(default_factory=dict)

    def within(self, place: Path) -> Layout:
        """The layout of a model that has this one at a path."""
        parts = {(*place, *path): array.within(place) for path, array in self.parts.items()}
        moved = {(*place, *path): (*place, *new) for path, new in self.moved.items()}
        return Layout(parts, moved)

    def places(self, leaves: Mapping[Path, Any], known: Mapping[Path, Any]) -> Places:
        """Where a checkpoint has the leaves of a state of this layout, and of trees like that of the parameters.

        ``known`` are arrays of the model: what has the path of one is not taken for what another part of it shares.
        """
        return {path: self._place(path, np.shape(leaf), known) for path, leaf in leaves.items()}

    def _place(self, path: Path, shape: tuple[int, ...], known: Mapping[Path, Any]) -> Path | Parts:
        for end in ends(path)[:-1]:
            tree = path[: len(path) - len(end)]
            if end in self.parts and (parts := _of_shape(self.parts[end], path, shape)):
                return parts.within(tree)
            for stop in range(1, len(end)):
                if end[:stop] in self.moved:
                    return (*tree, *self.moved[end[:stop]], *end[stop:])
            if end in known:
                return path
        if not self._last_names.isdisjoint(itertools.pairwise(path)):
            got = "an array of a stack, or of a table beside stacks, whose path does not end as one of the model"
            expected = "one optimizer of the whole model, or a call with each part of the model and its own"
            raise mismatch(named("state", path), got, expected)
        return path

    @functools.cached_property
    def _last_names(self) -> set[Path]:
        """The last two names of paths that are not those of checkpoints."""
        of_rows = [path for path, parts in self.parts.items() if None not in parts.rows]
        return {path[-2:] for path in (*of_rows, *self.moved)}


# By path of a leaf of a state.
Places = dict[Path, Path | Parts]
# `cut_arrays` or `cut_shapes`.
Cut = Callable[[Any, Parts], Sequence[Any]]


def _of_shape(parts: Parts, path: Path, shape: tuple[int, ...]) -> Parts | None:
    """The parts of an array at the path of a shared one; None for another array of this name."""
    if shape == parts.shape:
        return parts
    # Entries of tables have such names as the step of an optimizer has.
    if None in parts.rows:
        return None
    by_row = parts.shape[:1]
    if shape == by_row and by_row[0] not in parts.shape[1:]:
        return parts
    got = f"shape {shape}, which cannot be divided into the rows of tables"
    tables = ", ".join(of_table[-2] for of_table in parts.paths if of_table)
    expected = f"{parts.shape} or {by_row}, the rows of {tables} one after another"
    fix = "Other arrays of tables in a stack cannot be saved; build the model with stack=False."
    raise mismatch(named("state", path), got, expected, fix)


def parts_of_stacks(
    collection: Collection, *, stacks: Path = (), tables: Path = (), steps: Path = ()
) -> dict[Path, Parts]:
    """The parts of the arrays of stacks and of the step counts, with the paths of what has each of these by name."""
    parts: dict[Path, Parts] = {}
    for stack in collection.stacks.values():
        for name, shape in stack.shapes.items():
            paths = tuple((*tables, table, name) for table in stack.tables)
            rows = tuple(count for _, count in stack.places[name].values())
            parts[*stacks, stack.name, name] = Parts(shape, paths, rows)
    if collection.sharing:
        counts = tuple((*tables, table, "step") for table in collection.sharing)
        parts[*steps, "step"] = entries_of(counts)
    return parts


def entries_of(paths: Sequence[Path | None]) -> Parts:
    """The parts of an array with one entry for every table."""
    return Parts((len(paths),), tuple(paths), (None,) * len(paths))


def by_table(leaves: Mapping[Path, Any], places: Places, cut: Cut) -> dict[Path, Any]:
    """The leaves of a state where its checkpoints have them."""
    found: dict[Path, Any] = {}
    for path, leaf in leaves.items():
        place = places[path]
        pairs = (
            zip(place.paths, cut(leaf, place), strict=True)
            if isinstance(place, Parts)
            else [(place, leaf)]
        )
        for new, part in pairs:
            if new in found:
                got = f"what is saved as {'/'.join(new)}, which another array is, too"
                raise mismatch(named("state", path), got, "one array of each table")
            if new is not None:
                found[new] = part
    return found


def whole(leaves: dict[Path, Any], places: Places) -> dict[Path, Any]:
    """The inverse of `by_table`, which takes the leaves away, so that no more than one stack is there twice."""
    return {
        path: _joined([new and leaves.pop(new) for new in place.paths], place.rows)
        if isinstance(place, Parts)
        else leaves.pop(place)
        for path, place in places.items()
    }


def cut_shapes(leaf: Any, parts: Parts) -> list[jax.ShapeDtypeStruct]:
    """The shapes, types and shardings of `cut_arrays`."""
    entry = np.shape(leaf)[1:]
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        sharding = None
    if isinstance(sharding, NamedSharding):
        # Ops take a stack on every device.
        sharding = NamedSharding(sharding.mesh, P())
    of_parts = [entry if rows is None else (rows, *entry) for rows in parts.rows]
    return [jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding) for shape in of_parts]


def cut_arrays(leaf: Any, parts: Parts) -> list[jax.Array]:
    """The parts of an array."""
    return _cut(leaf, parts.rows)


# Several processes can only read and make arrays of all of them in a program.
@functools.partial(jax.jit, static_argnums=1)
def _cut(array: jax.Array, of_parts: tuple[int | None, ...]) -> list[jax.Array]:
    firsts = itertools.accumulate((rows or 1 for rows in of_parts), initial=0)
    return [
        array[first] if rows is None else jax.lax.slice_in_dim(array, first, first + rows)
        for first, rows in zip(firsts, of_parts, strict=False)
    ]


@functools.partial(jax.jit, static_argnums=1)
def _joined(parts: Sequence[Any], of_parts: tuple[int | None, ...]) -> jax.Array:
    like = next(part for part in parts if part is not None)
    each = [jnp.zeros_like(like) if part is None else part for part in parts]
    return jnp.stack(each) if None in of_parts else jnp.concatenate(each)
