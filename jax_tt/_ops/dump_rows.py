"""Dumps of dense tables."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, mismatch, type_of
from jax_tt._base.progress import Progress
from jax_tt._formats.dump import Dump
from jax_tt._formats.stored import FileError
from jax_tt._ops.changes import joined_digests, row_digests
from jax_tt._ops.dump_content import Content, Loaded
from jax_tt._table.check import check_state, check_table
from jax_tt._table.checkpoint import by_row, of_rows, unsharded
from jax_tt._table.state import State
from jax_tt._table.table import Table

# Among the arrays that do not belong to single keys: a digest of every row with its optimizer state.
_DIGESTS = "row_digests"


def content(table: Table, state: State, keys: Any, base: Dump | None) -> Content:
    """What a dump of a table has, or one of the changes since another."""
    table, state = _by_row(table, state)
    names, count = list(table.spec.row_arrays), table.num_embeddings
    named = np.arange(count, dtype=np.uint64) if keys is None else _keys(keys, count)
    digests = _row_digests(table, state)
    rows = np.arange(count)
    if base is not None:
        rows = np.flatnonzero(digests != _digests_of(base, count))
    of_keys = {
        "key": named[rows],
        "score": np.zeros(len(rows), np.uint64),
        "touched": np.ones(len(rows), np.int32),
    }
    return Content(
        table.features,
        of_keys,
        {name: str(state[name].dtype) for name in names},
        lambda part: {name: np.asarray(state[name][rows[part]]) for name in names},
        {name: state[name] for name in _rest_names(table)} | {_DIGESTS: digests},
        {},
    )


def loaded(
    table: Table,
    state: State,
    dump: Dump,
    keys: Any,
    optimizer_state: bool,
    overflow: str,
    method: str,
    bar: Progress,
) -> tuple[Loaded, dict[str, Any]]:
    """Puts the rows of a dump into a table."""
    del overflow, method
    sharded = table
    table, state = _by_row(table, state)
    check_state(table, state)
    count = table.num_embeddings
    named = np.arange(count, dtype=np.uint64) if keys is None else _keys(keys, count)
    order = np.argsort(named)
    taken = list(table.spec.row_arrays) if optimizer_state else list(table.spec.row_names)
    dump.check(table.features, taken, exact=optimizer_state)
    rest = dump.rest(_rest_names(table)) if optimizer_state else {}
    scalars = {
        name: jnp.asarray(rest[name])
        for name in _rest_names(table)
        if name in rest and rest[name].shape == state[name].shape
    }
    # One copy, which the files are then written into.
    arrays, written = [jnp.copy(state[name]) for name in taken], 0
    for part in dump.parts({name: state[name].shape[1:] for name in taken}):
        places = np.searchsorted(named, part["key"], sorter=order)
        rows = order[np.minimum(places, count - 1)]
        here = named[rows] == part["key"]
        arrays = _written(arrays, [part[name][here] for name in taken], rows[here])
        written += int(here.sum())
        bar.step()
    state = {**state, **dict(zip(taken, arrays, strict=True)), **scalars}
    if optimizer_state:
        _check_follows(table, state, dump)
    return Loaded(written, others=dump.keys - written), of_rows(sharded, state)


@partial(jax.jit, donate_argnums=0)
def _written(arrays: Any, new: Any, rows: jax.Array) -> Any:
    return [
        array.at[rows].set(entries.astype(array.dtype), unique_indices=True)
        for array, entries in zip(arrays, new, strict=True)
    ]


def _by_row(table: Any, state: State) -> tuple[Table, State]:
    """The table as one device would hold it, with its state."""
    check_table(table, state)
    plain = unsharded(table)
    if not plain.spec.row_names:
        got = f"{type_of(plain)}, whose rows are not entries of its arrays"
        fix = "States of other kinds have the same shapes at all times, and can be saved whole."
        expected = "a DenseTable or a HashTable"
        raise mismatch(f"{table.ids.label}table", got, expected, fix, TypeError)
    plain.ids.refuse_slots("table", "Tiers.dump and Tiers.load_dump take all of its rows")
    held = [state[name] for name in table.spec.row_names]
    if not all(array.is_fully_addressable or array.is_fully_replicated for array in held):
        got = f"arrays on devices of several processes for {type_of(plain)}"
        fix = "Save such tables with orbax, jax_tt.checkpoint.save_args."
        raise mismatch(f"{table.ids.label}state", got, "those of one process", fix)
    return plain, state if plain is table else by_row(table, state)


def _rest_names(table: Table) -> list[str]:
    """The arrays that do not belong to single rows."""
    return [name for name in table.spec.trained_names if name not in table.spec.row_arrays]


def _keys(keys: Any, count: int) -> np.ndarray:
    named = np.asarray(as_array("keys", keys))
    if named.dtype.kind not in "iu" or named.shape != (count,):
        raise mismatch("keys", named, f"integers of shape ({count},), the key of every row")
    named = named.astype(np.int64 if named.dtype.kind == "i" else np.uint64).view(np.uint64)
    if len(np.unique(named)) < count:
        raise ValueError("keys: some are equal; expected a different key for every row.")
    return named


def _row_digests(table: Table, state: State) -> np.ndarray:
    """Digests uint64 of every row with its optimizer state."""
    return joined_digests(*(row_digests(state[name]) for name in table.spec.row_arrays))


def _check_follows(table: Table, after: State, dump: Dump) -> None:
    """Raises unless a dump of changes has made the rows of the dumped table, in any order."""
    expected = dump.rest([_DIGESTS]).get(_DIGESTS)
    of_all = dump.since is None if expected is None else dump.keys == len(expected)
    if of_all:
        return
    if expected is None or expected.shape != (table.num_embeddings,):
        raise ValueError(
            f"{table.ids.label}state: {dump.path} has the changes of another kind or number of rows, and a dense table "
            f"of {table.num_embeddings} rows cannot tell whether it becomes the dumped one; load a dump of all rows."
        )
    if any(dump.arrays[name] != str(after[name].dtype) for name in table.spec.row_arrays):
        return  # other values, which cannot be compared
    if expected.sum(dtype=np.uint64) != _row_digests(table, after).sum(dtype=np.uint64):
        raise ValueError(
            f"{table.ids.label}state: its rows are not the rows that {dump.path} is a dump of changes of. Load a dump "
            "of all rows, and then the dumps of changes in their order."
        )


def _digests_of(base: Dump, count: int) -> np.ndarray:
    digests = base.rest([_DIGESTS]).get(_DIGESTS)
    if digests is None or digests.shape != (count,) or digests.dtype != np.uint64:
        raise FileError(
            f"{base.path}: is no dump of a dense table of {count} rows, so that changes since then are unknown; dump "
            "all rows."
        )
    return digests
