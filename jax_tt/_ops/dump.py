"""`dump` and `load_dump`: the rows of tables in files, key by key."""

from __future__ import annotations

import functools
import os
from typing import Any

from jax_tt._base.arguments import mismatch, one_of
from jax_tt._base.progress import Progress
from jax_tt._directories.placing import OVERFLOWS
from jax_tt._formats.dump import Dump
from jax_tt._formats.team import team_of
from jax_tt._kinds.hashed.table import HashTable
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._ops import dump_keys, dump_rows
from jax_tt._ops.dump_content import Content, Loaded, Target
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.state import State
from jax_tt._table.table import Table


def dump(
    table: Table,
    state: State,
    path: str | os.PathLike[str],
    *,
    keys: Any = None,
    since: str | os.PathLike[str] | None = None,
    rows_per_file: int = 1 << 20,
    progress: bool = True,
    overwrite: bool = False,
) -> int:
    """Writes the rows of a dense or hash table, with their keys and optimizer state, to files in a directory.

    The directory is complete or absent. If a call is cut off, the next one with the same arguments keeps the files that
    are finished; until then they are in a hidden directory beside it, ``.jax_tt_NAME.unfinished``. `load_dump` reads a
    dump into a hash table of any capacity and storage type, or into a dense table. Arrays are written in their types,
    ``rows_per_file`` rows at a time.

    Where devices of several processes hold a hash table, all of them call this with the same arguments, and each writes
    the rows of its devices to the directory, which all of them can see. An error of one process is an error of all.

    Args:
        table: one whose rows belong to single ids: a `DenseTable`, or a `HashTable` of one, also sharded over devices.
            The state of other tables has the same shapes at all times, and can be saved like any other.
        state: its arrays by name.
        path: of the directory.
        keys: distinct integers of 64 bits ``[N]``, the key of every row of a dense table; None for 0 to N - 1. A hash
            table has keys, and takes none.
        since: an earlier dump of this table, whole or of changes; only rows that have changed since then are written,
            and of a hash table the names of all keys. A digest of 64 bits tells them apart, which every dump
            has for every row, so that nothing is missed, whatever was loaded or removed in between.
        rows_per_file: rows in one file, at most.
        progress: show a progress bar if it takes longer than a second.
        overwrite: replace an existing dump, at once when the new one is complete. A directory with anything else in it
            is never replaced, nor is the dump ``since``.

    Returns:
        The number of rows that were written.

    Raises:
        FileError: the directory cannot be written, or exists and ``overwrite`` is False (then also a
            `FileExistsError`) or it is not a dump; or ``since`` is no dump of such a table, or is ``path``.
        TypeError, ValueError: an argument does not fit.

    >>> import jax, jax_tt, os, tempfile
    >>> table = jax_tt.dense_table(100, 8)
    >>> state, place = table.init(jax.random.key(0)), tempfile.mkdtemp()
    >>> jax_tt.files.dump(table, state, os.path.join(place, "first"))
    100
    >>> changed = {**state, "embedding": state["embedding"].at[7].add(1.0)}
    >>> jax_tt.files.dump(table, changed, os.path.join(place, "second"), since=os.path.join(place, "first"))
    1
    >>> for name in ("first", "second"):
    ...     loaded, state = jax_tt.files.load_dump(table, state, os.path.join(place, name))
    >>> loaded.rows, bool((state["embedding"] == changed["embedding"]).all())
    (1, True)
    """
    if since is not None and not isinstance(since, str | os.PathLike):
        expected = "the path of an earlier dump of this table, or None for all rows"
        raise mismatch("since", repr(since), expected, error=TypeError)
    target = Target(path, rows_per_file, progress, overwrite)
    team = team_of(state)
    with team.together(path):
        target.check(*([] if since is None else [since]))
        base = None if since is None else Dump.open(since)
    with team.together(path):
        content = _content(table, state, keys, base)
    about = {**content.about, "since": None if since is None else os.fsdecode(since)}
    return target.write(content._replace(about=about), team)


def load_dump(
    table: Table,
    state: State,
    path: str | os.PathLike[str],
    *,
    keys: Any = None,
    optimizer_state: bool = True,
    overflow: str = "evict",
    method: str = "auto",
    progress: bool = True,
) -> tuple[Loaded, dict[str, Any]]:
    """Puts the rows of a dump into a dense or hash table.

    Into a dense table: the other rows of the table stay as they are.

    Into a hash table: keys come with their rows, scores, last batches and admission counts. The capacity and the number
    of devices may differ from those of the dumped table, and so may storage types, to which values are rounded. Keys
    that the table has already are overwritten. Afterwards it has the keys of the dump beside its other keys, as far as
    there is room: where it is full, the keys with the lowest scores are evicted, as in training, and counted. Where
    the table has the capacity, the ways and the number of devices of the dumped one, and no other keys in their slots,
    all keys come into the slots that they had, whatever the load. Step counts, the seed and totals become those of the
    dump, and the number of batches the larger one.

    A dump of changes makes the dumped table: its keys, without those that have left it, its slots where the sizes are
    the same, and the number of its batches. It is loaded after the dump that it follows, or into a table that has all
    keys beside the changed ones as they were dumped, such as one that has later changes already. All processes whose
    devices hold the table call this, and each reads the files.

    Args:
        table: as in `dump`, on any number of devices.
        state: its arrays by name, such as ``table.init(key)``.
        path: of the directory that `dump` or `Tiers.dump` wrote.
        keys: distinct integers of 64 bits ``[N]``, the key of every row of a dense table; None where the keys of the
            dump are rows. A hash table takes none.
        optimizer_state: whether to load the optimizer state, which must be of the optimizer of the table. Otherwise a
            dense table keeps its optimizer state, and a hash table resets it for the keys of the dump.
        overflow: what becomes of keys of a hash table, its own or those of the dump, that find no room: ``"evict"``
            evicts as few keys as possible, those with the lowest scores; ``"error"`` refuses the dump, as the policy
            ``"none"`` always does. Of keys that wait for admission, the oldest are forgotten with either.
        method: of the writes into a hash table, as in `tt.embed_bag`.
        progress: as in `dump`.

    Returns:
        `Loaded`, and the state.

    Raises:
        FileError: the directory is missing, incomplete, damaged, or of another kind of table.
        ValueError: a hash table has no room for all keys, and may evict none, and the message has the smallest capacity
            that has room; or the dump is one of changes, and the table would not become the dumped one; or ``keys`` do
            not fit.
        TypeError: the rows of the table do not belong to single ids.

    >>> import jax, jax_tt, numpy as np, os, tempfile
    >>> source, path = jax_tt.hash_table(64, 8), os.path.join(tempfile.mkdtemp(), "items")
    >>> keys = np.array([10**12, -5, 7])
    >>> _, state = jax_tt.dynamic.insert(source, source.init(jax.random.key(0)), keys)
    >>> count = jax_tt.files.dump(source, state, path)
    >>> larger = jax_tt.hash_table(256, 8)
    >>> loaded, state = jax_tt.files.load_dump(larger, larger.init(jax.random.key(1)), path)
    >>> loaded
    Loaded(rows=3, others=0, evicted=0, forgotten=0)
    >>> table = jax_tt.dense_table(3, 8)
    >>> loaded, state = jax_tt.files.load_dump(table, table.init(jax.random.key(1)), path, keys=keys)
    >>> loaded.rows
    3
    """
    one_of("overflow", overflow, OVERFLOWS)
    team = team_of(state)
    with team.together(path):
        given = Dump.open(path)
    with team.together(path), Progress(progress, "load_dump", len(given.files)) as bar:
        return _loaded(table, state, given, keys, optimizer_state, overflow, method, bar)


_content = functools.singledispatch(dump_rows.content)
_content.register(HashTable, dump_keys.content)
_loaded = functools.singledispatch(dump_rows.loaded)
_loaded.register(HashTable, dump_keys.loaded)


@_content.register
def _(table: ShardedTable, *rest: Any) -> Content:
    return _content.dispatch(type(unsharded(table)))(table, *rest)


@_loaded.register
def _(table: ShardedTable, *rest: Any) -> tuple[Loaded, dict[str, Any]]:
    return _loaded.dispatch(type(unsharded(table)))(table, *rest)
