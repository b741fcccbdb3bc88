"""Read-only tables with their states in files: what quantized and coded ones have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_tt._files.tables import check_tables_path
from jax_tt._formats.arrays import open_arrays
from jax_tt._formats.orbax_directory import write_orbax
from jax_tt._formats.output import check_output, writing
from jax_tt._formats.safetensors_file import write_safetensors
from jax_tt._formats.stored import FileError, StoredArrays
from jax_tt._table.table import Table
from jax_tt._table.types import State

_VERSION = 1
Pair = tuple[Any, State]


def write_pairs(
    path: str | os.PathLike[str],
    kind: str,
    tables: Mapping[str, Pair],
    notes: Callable[[Any], dict[str, Any]],
    overwrite: bool,
) -> None:
    """Writes the arrays ``name.array`` of tables that were checked, with notes on each under the key ``kind``."""
    arrays = {
        f"{name}.{key}": np.asarray(array)
        for name, (_, state) in tables.items()
        for key, array in state.items()
    }
    all_notes = {name: notes(table) for name, (table, _) in tables.items()}
    directory = check_tables_path(path)
    check_output(path, overwrite=overwrite, directory=directory)
    write = write_orbax if directory else write_safetensors
    with writing(path, overwrite=overwrite, directory=directory) as new:
        write(new, arrays, {"version": _VERSION, kind: all_notes})


def checked_pairs(
    tables: Any, require: Callable[[Any], Table], made_by: str, frozen: str
) -> Mapping[str, Pair]:
    """Tables with their states by name, which are of one kind and read-only.

    Args:
        tables: what the user gave.
        require: returns a table of the kind, and raises for others.
        made_by: a call that returns such a pair.
        frozen: what to do with a table that is trained.
    """
    if not isinstance(tables, Mapping):
        raise TypeError(
            f"tables: got a {type(tables).__name__}; expected a mapping from names to tables with their states, e.g. "
            f"{{'items': {made_by}}}."
        )
    for name, pair in tables.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"tables[{name!r}]: got a {type(pair).__name__}; expected a table with its state, as "
                f"{made_by.partition('(')[0]} returns them."
            )
        table, state = pair
        if require(table).update is not None:
            raise ValueError(
                f"tables[{name!r}]: got a table with an optimizer, whose state such a file does not hold; expected a "
                f"read-only one, {frozen}. Save the whole state in a checkpoint to train on."
            )
        table.check(state)
    return tables


def read_pairs(
    path: str | os.PathLike[str], kind: str, read: Callable[[StoredArrays, str, Any], Pair]
) -> dict[str, Any]:
    """What ``read(stored, name, notes)`` returns for every table of a file that `write_pairs` wrote."""
    stored = open_arrays(path)
    found = stored.notes.get(kind)
    if not isinstance(found, Mapping) or not found:
        raise FileError(
            f"{stored.path}: holds no {kind} table of jax_tt.save_{kind}, only {stored.listed()}."
        )
    pairs = {}
    for name, notes in found.items():
        try:
            pairs[name] = read(stored, name, notes)
        except FileError:
            raise
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise FileError(f"{stored.path}: the table {name!r}: {error}") from error
    return pairs
