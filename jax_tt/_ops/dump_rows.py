"""`dump_rows` and `load_rows`: dense tables in files, row by row."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_array, as_positive, one_of
from jax_tt._base.progress import Progress
from jax_tt._formats.dump import DUMP, FORMATS, Dump, write_dump
from jax_tt._formats.output import check_output
from jax_tt._formats.stored import FileError
from jax_tt._ops.row_digests import joined_digests, row_digests
from jax_tt._table.table import Table
from jax_tt._table.types import State

# In the arrays beside those of keys: a number for every row, which changes with its values and optimizer state.
_DIGESTS = "row_digests"


class LoadedRows(NamedTuple):
    """What `load_rows` did.

    Attributes:
        rows: rows that were loaded.
        others: keys of the dump that have no row in the table.

    >>> import jax_tt
    >>> jax_tt.LoadedRows(rows=5, others=0).rows
    5
    """

    rows: int
    others: int


def dump_rows(
    table: Table,
    state: State,
    path: str | os.PathLike[str],
    *,
    keys: Any = None,
    since: str | os.PathLike[str] | None = None,
    rows_per_file: int = 1 << 20,
    format: str = "safetensors",
    progress: bool = True,
    overwrite: bool = False,
) -> int:
    """Writes the rows of a dense table with their optimizer state to files in a directory.

    The files are those of `dump_keys`: complete or absent, finished by the next call if one is cut off, and read by
    `load_rows` and, into a `HashTable`, by `load_keys`.

    Args:
        table: one whose rows belong to single ids, such as a `DenseTable`, also on several devices.
        state: its arrays by name.
        path: of the directory.
        keys: distinct integers of 64 bits ``[N]``, the key of every row; None for 0 to N - 1.
        since: an earlier dump of this table, whole or of changes; only rows that have changed since then are written.
            They are told apart by a digest of 64 bits a row, which every dump holds.
        rows_per_file: rows in one file, at most.
        format: as in `dump_keys`.
        progress, overwrite: as in `dump_keys`. The dump ``since`` cannot be replaced.

    Returns:
        The number of rows that were written.

    Raises:
        FileError: as in `dump_keys`; or ``since`` is no dump of this table, or is ``path``.
        TypeError, ValueError: an argument does not fit.
        ImportError: ``format`` is ``"orbax"``, which is not installed.

    >>> import jax, jax_tt, numpy as np, os, tempfile
    >>> table = jax_tt.dense_table(100, 8)
    >>> state, place = table.init(jax.random.key(0)), tempfile.mkdtemp()
    >>> jax_tt.dump_rows(table, state, os.path.join(place, "first"))
    100
    >>> changed = {**state, "embedding": state["embedding"].at[7].add(1.0)}
    >>> jax_tt.dump_rows(table, changed, os.path.join(place, "second"), since=os.path.join(place, "first"))
    1
    >>> for name in ("first", "second"):
    ...     state, _ = jax_tt.load_rows(table, state, os.path.join(place, name))
    >>> bool((state["embedding"] == changed["embedding"]).all())
    True
    """
    table, state = _by_row(table, state)
    size = as_positive("rows_per_file", rows_per_file)
    one_of("format", format, FORMATS)
    base = [] if since is None else [since]
    check_output(path, overwrite=overwrite, directory=True, contents=DUMP, others=base)
    names, count = list(table.row_arrays), table.num_embeddings
    named = np.arange(count, dtype=np.uint64) if keys is None else _keys(keys, count)
    before = None if since is None else _digests_of(since, count)
    digests = joined_digests(*(row_digests(state[name]) for name in names))

    def parts() -> Iterator[dict[str, np.ndarray]]:
        for first in range(0, count, size):
            rows = np.arange(first, min(first + size, count))
            arrays = [np.asarray(state[name][rows]) for name in names]
            if before is not None:
                chosen = np.flatnonzero(digests[rows] != before[rows])
                rows, arrays = rows[chosen], [array[chosen] for array in arrays]
            if len(rows):
                scores, touched = np.zeros(len(rows), np.uint64), np.ones(len(rows), np.int32)
                of_keys = {"key": named[rows], "score": scores, "touched": touched}
                yield of_keys | dict(zip(names, arrays, strict=True))

    rest = {name: state[name] for name in _rest_names(table)} | {_DIGESTS: digests}
    about = {
        "features": table.features,
        "since": None if since is None else os.fsdecode(since),
        "arrays": {name: str(state[name].dtype) for name in names},
    }
    with Progress(progress, "dump_rows", -(-count // size)) as bar:
        return write_dump(path, parts(), rest, about, format, bar, overwrite=overwrite)


def load_rows(
    table: Table,
    state: State,
    path: str | os.PathLike[str],
    *,
    keys: Any = None,
    optimizer_state: bool = True,
    progress: bool = True,
) -> tuple[dict[str, Any], LoadedRows]:
    """Puts the rows of a dump into a dense table; the other rows of the table stay as they are.

    Args:
        table: as in `dump_rows`.
        state: its arrays by name, such as those of ``table.init(key)``.
        path: of the directory that `dump_rows`, `dump_keys` or `Tiers.dump` wrote.
        keys: distinct integers of 64 bits ``[N]``, the key of every row; None where the keys of the dump are rows.
        optimizer_state: whether to load the optimizer state, which must be that of the rule of the table; otherwise
            that of the table stays.
        progress: as in `dump_keys`.

    Returns:
        The state, and `LoadedRows`.

    Raises:
        FileError: the directory is missing, incomplete, damaged or that of another kind of table.
        TypeError, ValueError: an argument does not fit.

    >>> import jax, jax_tt, numpy as np, os, tempfile
    >>> source, path = jax_tt.hash_table(64, 8), os.path.join(tempfile.mkdtemp(), "items")
    >>> keys = np.array([10**12, -5, 7])
    >>> _, state = jax_tt.insert_keys(source, source.init(jax.random.key(0)), keys)
    >>> last = jax_tt.dump_keys(source, state, path)
    >>> table = jax_tt.dense_table(3, 8)
    >>> loaded, counts = jax_tt.load_rows(table, table.init(jax.random.key(1)), path, keys=keys)
    >>> counts
    LoadedRows(rows=3, others=0)
    """
    sharded = table
    table, state = _by_row(table, state)
    table.check(state)
    dump, count = Dump.open(path), table.num_embeddings
    named = np.arange(count, dtype=np.uint64) if keys is None else _keys(keys, count)
    order = np.argsort(named)
    taken = list(table.row_arrays) if optimizer_state else list(table.row_names)
    dump.check(table.features, taken, exact=optimizer_state)
    rest = dump.rest(_rest_names(table)) if optimizer_state else {}
    scalars = {
        name: jnp.asarray(rest[name])
        for name in _rest_names(table)
        if name in rest and rest[name].shape == state[name].shape
    }
    # One copy, which the files are then written into.
    arrays, loaded = [jnp.copy(state[name]) for name in taken], 0
    with Progress(progress, "load_rows", len(dump.files)) as bar:
        for part in dump.parts({name: state[name].shape[1:] for name in taken}):
            places = np.searchsorted(named, part["key"], sorter=order)
            rows = order[np.minimum(places, count - 1)]
            own = named[rows] == part["key"]
            new = [part[name][own] for name in taken]
            arrays = _written(arrays, new, rows[own])
            loaded += int(own.sum())
            bar.step()
    state = {**state, **dict(zip(taken, arrays, strict=True)), **scalars}
    state = state if sharded is table else sharded.of_rows(state)
    return state, LoadedRows(loaded, dump.keys - loaded)


@partial(jax.jit, donate_argnums=0)
def _written(arrays: Any, new: Any, rows: jax.Array) -> Any:
    return [
        array.at[rows].set(entries.astype(array.dtype), unique_indices=True)
        for array, entries in zip(arrays, new, strict=True)
    ]


def _by_row(table: Any, state: State) -> tuple[Table, State]:
    """The table as one device would hold it, with its state."""
    if not isinstance(table, Table):
        raise TypeError(
            f"table: got a {type(table).__name__}; expected a table such as a DenseTable."
        )
    plain = table.unsharded
    if not plain.row_names:
        raise TypeError(
            f"{table.ids.label}table: the rows of a {type(plain).__name__} are not entries of its arrays; expected a "
            "DenseTable. dump_keys takes a HashTable; the states of other kinds have the same shapes at all times, and "
            "can be saved whole."
        )
    return plain, state if plain is table else table.by_row(state)


def _rest_names(table: Table) -> list[str]:
    """The arrays that do not belong to single rows."""
    return [name for name in table.trained_shapes if name not in table.row_arrays]


def _keys(keys: Any, count: int) -> np.ndarray:
    found = np.asarray(as_array("keys", keys))
    if found.dtype.kind not in "iu" or found.shape != (count,):
        raise ValueError(
            f"keys: got {found.dtype} of shape {found.shape}; expected integers of shape ({count},), the key of every "
            "row."
        )
    found = found.astype(np.int64 if found.dtype.kind == "i" else np.uint64).view(np.uint64)
    if len(np.unique(found)) < count:
        raise ValueError("keys: some are equal; expected a key of its own for every row.")
    return found


def _digests_of(path: str | os.PathLike[str], count: int) -> np.ndarray:
    found = Dump.open(path).rest([_DIGESTS]).get(_DIGESTS)
    if found is None or found.shape != (count,) or found.dtype != np.uint64:
        raise FileError(
            f"{os.fsdecode(path)}: is no dump of a table of {count} rows by dump_rows, so that changes since then are "
            "unknown; dump all rows."
        )
    return found
