"""What of a training state is laid out as a table: its arrays, and whatever has a tree like that of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._collection.by_table import Cut, Layout, Places, by_table, cut_shapes, parts_of_stacks
from jax_tt._collection.collection import Collection
from jax_tt._collection.paths import Path, by_path, ends, named
from jax_tt._collection.states import UPDATES
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._table.table import Table

# By place: a table, and arrays that are laid out as its arrays of these names.
Groups = dict[Path, tuple[Table, dict[str, Any]]]

# Where Flax has parameters. An array there has an order of its own, and so have its moments.
_PARAMS = "params"


class Described(NamedTuple):
    """What a model says about its states.

    Attributes:
        tables: by their path in a checkpoint.
        known: all its arrays as far as it knows them, by their path in its state.
        layout: which of these a checkpoint has elsewhere.
    """

    tables: Mapping[Path, Table]
    known: Mapping[Path, Any]
    layout: Layout


@functools.singledispatch
def tables_of(model: Any) -> Described:
    """The tables of a model."""
    raise TypeError(
        f"model: got {type_of(model)}; expected a jax_tt.Collection, an NNX module, or a jax_tt.linen.EmbedCollection. "
        "The jax_tt.Collection for another linen layer has its table under the name of the layer."
    )


@tables_of.register
def _(model: Collection) -> Described:
    tables = {(name,): table for name, table in model.tables.items()}
    return Described(tables, {}, Layout(parts_of_stacks(model, steps=(UPDATES,))))


def divided(model: Any, state: Any, cut: Cut) -> tuple[Groups, dict[Path, Any], Places]:
    """The arrays that are laid out as those of a table, by place and name, and all others by path.

    These are paths in a checkpoint, which has what tables share by table: the leaves of the state are at the places
    that are returned.
    """
    tables, of_model, layout = tables_of(model)
    given = by_path(state)
    places = layout.places(given, of_model)
    leaves = by_table(given, places, cut)
    of_model = by_table(of_model, layout.places(of_model, of_model), cut_shapes)
    known = {path: np.shape(leaf) for path, leaf in of_model.items()}
    # Other arrays, whose moments have their names.
    ordinary = {path: np.shape(leaf) for path, leaf in leaves.items() if _PARAMS in path[:-1]}
    names: dict[str, list[tuple[int, ...]]] = {}
    for path, shape in (ordinary | known).items():
        if _table_of(path, tables, known) is None:
            names.setdefault(path[-1], []).append(shape)
    groups: Groups = {}
    others: dict[Path, Any] = {}
    for path, leaf in leaves.items():
        table = _table_of(path, tables, known)
        if table is not None and _follows(table, path, leaf):
            _check_whole_model(tables, leaves, path)
            groups.setdefault(path[:-1], (table, {}))[1][path[-1]] = leaf
            continue
        if table is None and not any(_is_moment(leaf, of) for of in names.get(path[-1], ())):
            _check_no_rows(tables, path, leaf)
        others[path] = leaf
    for path, table in tables.items():
        held = {name for place, (_, own) in groups.items() if path in ends(place) for name in own}
        missing = [array.name for array in table.spec.arrays if array.name not in held]
        if missing:
            got = f"no array {missing[0]!r} of the table {'/'.join(path)!r} of the model"
            expected = "the whole training state of this model, tables and optimizer"
            raise mismatch("state", got, expected)
    return groups, others, places


def _table_of(path: Path, tables: Mapping[Path, Table], known: Mapping[Path, Any]) -> Table | None:
    """The table that has an array of this name, unless the model has another array whose path fits better."""
    for end in ends(path)[:-1]:
        table = tables.get(end[:-1])
        if table is not None and any(array.name == end[-1] for array in table.spec.arrays):
            return table
        if end in known:
            return None
    return None


def _is_moment(leaf: Any, of: tuple[int, ...]) -> bool:
    """Whether an array has the shape of another, or that of its factored moments."""
    shape = np.shape(leaf)
    return shape == of or (len(shape) < len(of) and set(shape) <= set(of))


def _check_whole_model(
    tables: Mapping[Path, Table], leaves: Mapping[Path, Any], path: Path
) -> None:
    """Raises for what may be of a part of the model, in which another table has the path of this one."""
    place, name = path[:-1], path[-1]
    own = next(end for end in ends(place) if end in tables)
    tree = place[: len(place) - len(own)]
    for longer, table in tables.items():
        if longer == own or longer[-len(own) :] != own or table.update is not None:
            continue
        if name in table.spec.param_names and (*tree, *longer, name) not in leaves:
            raise ValueError(
                f"{named('state', path)}: may be of the table {'/'.join(own)!r} or of {'/'.join(longer)!r}, which the "
                f"tree at {named('state', tree)} lacks; expected one optimizer of the whole model, or a call of "
                "save_args with each part of the model and its optimizer."
            )


def _follows(table: Table, path: Path, leaf: Any) -> bool:
    """Whether an array under the name of one of a table is laid out as that one, with an entry for every row."""
    shape, like = np.shape(leaf), table.spec.shapes.get(path[-1])
    if like is None or shape == like:
        return True
    sharded = isinstance(table, ShardedTable)
    rows = set(like[:1])
    by_row = rows.isdisjoint(like[1:]) and not (sharded and table.layout.columns > 1)
    if by_row and shape == like[:1]:
        return True
    if not sharded or (len(shape) < len(like) and rows.isdisjoint(shape)):
        return False
    expected = f"{like}{f' or {like[:1]}' if by_row else ''}, as the table {table.name!r} stores it"
    raise mismatch(named("state", path), f"shape {shape}, which cannot be placed", expected)


def _check_no_rows(tables: Mapping[Path, Table], path: Path, leaf: Any) -> None:
    """Raises if an array may be in the order of the devices of a table."""
    shape = np.shape(leaf)
    for place, table in tables.items():
        if not isinstance(table, ShardedTable) or table.ids.takes_keys:
            continue
        rows = table.stored.num_embeddings
        if rows in shape or (len(shape) == 1 and shape[0] >= rows * table.stored.features):
            raise ValueError(
                f"{named('state', path)}: got shape {shape}, which cannot be placed: the sharded table "
                f"{'/'.join(place)!r} stores {rows:,} rows. If the array follows them, its path has to end as that of "
                f"the array of the table, e.g. {named('', (*place, *table.spec.param_names[:1]))}, as in trees like "
                "that of the parameters; otherwise keep it, with its moments, under 'params', or save it apart."
            )
