"""`dump_keys` and `load_keys`: hash tables in files, key by key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._arguments import as_int, as_positive, one_of
from jax_tt._files.dump import FORMATS, Dump, write_dump
from jax_tt._files.stored import FileError
from jax_tt._hash import backend
from jax_tt._hash.directory import Eviction
from jax_tt._hash.entries import table_keys
from jax_tt._hash.hashing import homes_of
from jax_tt._hash.keys import split_keys
from jax_tt._hash.table import (
    CLOCK,
    KEYS,
    HashTable,
    directory_of,
    named_directory,
    require_hash_table,
    unsharded_hash_table,
)
from jax_tt._progress import Progress
from jax_tt._sharding.rehash import rehashed_waiting
from jax_tt._tables.options import Lookup
from jax_tt._tables.table import State


class Loaded(NamedTuple):
    """What `load_keys` did.

    Attributes:
        keys: the number of keys in the dump.
        evicted: keys of the dump or of the table before that found no room in the end, those with the lowest scores.

    >>> import jax_tt
    >>> jax_tt.Loaded(keys=5, evicted=0).keys
    5
    """

    keys: int
    evicted: int


def dump_keys(
    table: HashTable,
    state: State,
    path: str | os.PathLike[str],
    *,
    since: int = 0,
    keys_per_file: int = 1 << 20,
    format: str = "safetensors",
    progress: bool = True,
    overwrite: bool = False,
) -> int:
    """Writes the keys of a table with their rows to files in a directory.

    The directory is complete or absent. If a call is cut off, the next one with the same arguments keeps the files that
    are finished; until then they are in a hidden directory beside it, ``.jax_tt_NAME.unfinished``. `load_keys` reads a
    dump into a table of any capacity and storage type, and `load_rows` into a dense table. Arrays are written in their
    types, ``keys_per_file`` keys at a time.

    Args:
        table: the `HashTable`, or a `ShardedTable` of one, whose rows are those of single keys: not one of tensor
            trains, whose state has the same shapes at all times and can be saved like any other.
        state: its arrays by name.
        path: of the directory.
        since: only keys that were requested after this batch, for a dump of what has changed since the dump that
            returned this number. Keys that have left the table since then are not named.
        keys_per_file: keys in one file.
        format: ``"safetensors"``, or ``"orbax"`` for a checkpoint in place of every file.
        progress: show a progress bar if it takes longer than a second.
        overwrite: replace an existing dump, at once when the new one is complete. A directory with anything else in it
            is never replaced.

    Returns:
        The number of the last batch, for ``since``.

    Raises:
        FileError: the directory cannot be written, or exists and ``overwrite`` is False (then also a
            `FileExistsError`) or it is not a dump.
        TypeError, ValueError: an argument does not fit.
        ImportError: ``format`` is ``"orbax"``, which is not installed.

    >>> import jax, jax_tt, numpy as np, os, tempfile
    >>> table = jax_tt.hash_table(8, 1024)
    >>> state, _ = jax_tt.insert_keys(table, table.init(jax.random.key(0)), np.arange(5))
    >>> path = os.path.join(tempfile.mkdtemp(), "items")
    >>> jax_tt.dump_keys(table, state, path)
    1
    >>> other = jax_tt.hash_table(8, 64)
    >>> loaded, counts = jax_tt.load_keys(other, other.init(jax.random.key(1)), path)
    >>> rows, _ = jax_tt.lookup_rows(table, state, np.arange(5), jax_tt.Lookup())
    >>> again, _ = jax_tt.lookup_rows(other, loaded, np.arange(5), jax_tt.Lookup())
    >>> bool((rows == again).all()), counts.keys
    (True, 5)
    """
    own = _with_own_rows(unsharded_hash_table(table))
    divided, table = table.divided, own
    size, first = as_positive("keys_per_file", keys_per_file), as_int("since", since)
    one_of("format", format, FORMATS)
    entries = table_keys(table, state)
    entries = entries[entries["touched"] > first]
    names = list(table.table.row_arrays)
    # The slots of divided tables are those of every device, and mean nothing for another number of devices.
    of_keys = [name for name in entries.dtype.names or () if name != "slot" or not divided]

    def parts() -> Iterator[dict[str, np.ndarray]]:
        for k in range(0, len(entries), size):
            part = entries[k : k + size]
            yield {
                **{name: np.ascontiguousarray(part[name]) for name in of_keys},
                **{name: np.asarray(state[name][part["slot"]]) for name in names},
            }

    about = {
        "features": table.features,
        "since": first,
        "arrays": {name: str(state[name].dtype) for name in names},
    }
    if not divided:
        about |= {"sets": table.sets, "ways": table.ways}
    rest = {name: value for name, value in state.items() if name in _rest_names(table)}
    if divided:
        rest |= rehashed_waiting(table, state, 1)
    with Progress(progress, "dump_keys", -(-len(entries) // size)) as bar:
        write_dump(path, parts(), rest, about, format, bar, overwrite=overwrite)
    return int(state[CLOCK])


def load_keys(
    table: HashTable,
    state: State,
    path: str | os.PathLike[str],
    *,
    optimizer_state: bool = True,
    method: str = "auto",
    progress: bool = True,
) -> tuple[dict[str, Any], Loaded]:
    """Puts the keys of a dump into a table, with their rows, scores and last batches.

    Keys that the table has already are overwritten; load the dump of a whole table first, then those of changes.
    The capacity may differ from that of the dumped table, and so may storage types, to which values are rounded.
    Keys come into their slots where the table is empty and has the capacity and the ways of the dumped one, which
    was not divided. Where a table has no room for all keys, those with the highest scores stay. Step counts, the
    seed and totals become those of the dump, and the number of batches the larger one.

    Args:
        table: the `HashTable`, or a `ShardedTable` of one, on any number of devices.
        state: its arrays by name, such as those of ``table.init(key)``.
        path: of the directory that `dump_keys` wrote.
        optimizer_state: whether to load the optimizer state, which must be that of the rule of the table; otherwise
            that of the keys is reset.
        method: as in `tt_embed_bag`.
        progress: as in `dump_keys`.

    Returns:
        The state, and `Loaded`.

    Raises:
        FileError: the directory is missing, incomplete, damaged or that of another kind of table.
        ValueError: the policy is "none" and there is no room for all keys.
        TypeError: ``table`` is not a `HashTable` whose rows are those of single keys.

    >>> import jax, jax_tt, numpy as np, os, tempfile
    >>> table, path = jax_tt.hash_table(8, 64), os.path.join(tempfile.mkdtemp(), "items")
    >>> state, _ = jax_tt.insert_keys(table, table.init(jax.random.key(0)), np.arange(5))
    >>> last = jax_tt.dump_keys(table, state, path)
    >>> larger = jax_tt.hash_table(8, 256)
    >>> loaded, counts = jax_tt.load_keys(larger, larger.init(jax.random.key(1)), path)
    >>> counts
    Loaded(keys=5, evicted=0)
    """
    sharded: Any = table
    table, state = _with_own_rows(unsharded_hash_table(table)), dict(state)
    if sharded.divided:
        state = sharded.by_row(state)
    table.check(state)
    dump = Dump.open(path)
    wanted = table.table.row_arrays
    taken = list(wanted) if optimizer_state else list(table.table.row_names)
    dump.check(table.features, taken, exact=optimizer_state)
    method = table.method(Lookup(method=method), state)
    scalars = {
        name: jnp.asarray(value)
        for name, value in dump.rest().items()
        if name in _rest_names(table) and value.shape == state[name].shape
        if optimizer_state or name.startswith("hash_")
    }
    evicted = 0
    # The batches of both tables lie in the past. The dump of a table without batches is of batch 1.
    scalars[CLOCK] = jnp.maximum(state[CLOCK], scalars.get(CLOCK, 1))
    now = int(scalars[CLOCK])
    same = dump.sets == (table.sets, table.ways) and not bool(jnp.any(state[KEYS[2]] > 0))
    # One copy, which the files are then written into.
    state = {**state, **{array: jnp.copy(state[array]) for array in wanted}}
    with Progress(progress, "load_keys", len(dump.files)) as bar:
        for part in dump.parts({own: state[own].shape[1:] for own in taken}):
            if same:
                state = _put_back(table, state, part, wanted, method, dump.path)
                bar.step()
                continue
            for piece in _pieces(part, table.num_embeddings):
                now += 1
                state, more = _placed(table, state, piece, wanted, now, method)
                evicted += more
            bar.step()
    return sharded.of_rows(state | scalars), Loaded(dump.keys, evicted)


def _pieces(part: Mapping[str, np.ndarray], capacity: int) -> Iterator[dict[str, np.ndarray]]:
    """The keys of a file in random order, in pieces that are small beside the table.

    An insertion chooses between the two sets of a key by what is in them before, so that many keys at once, or in the
    order of their slots, would find less room than they had.
    """
    size = max(1024, capacity // 64)
    order = np.random.default_rng(0).permutation(len(part["key"]))
    for k in range(0, len(order), size):
        yield {name: array[order[k : k + size]] for name, array in part.items()}


def _placed(
    table: HashTable,
    state: dict[str, Any],
    part: Mapping[str, np.ndarray],
    wanted: Mapping[str, Any],
    now: int,
    method: str,
) -> tuple[dict[str, Any], int]:
    """The state with these keys, and how many keys found no room."""
    keys, given = (jnp.asarray(_words(part[name])) for name in ("key", "score"))
    here = jnp.ones(len(part["key"]), bool)
    # Under "none", all scores are 0, and no key may take the place of another one.
    eviction = Eviction("none" if table.policy == "none" else "custom")
    directory, done = backend.insert(
        *(directory_of(state), keys, here, given, jnp.int32(now), jnp.uint32(0)),
        *(eviction, method),
    )
    evicted, refused = (int(count) for count in done.counts[-2:])
    if refused and eviction.policy == "none":
        raise ValueError(
            f"{table.label}table: has no room for {refused} keys of the dump in its {table.num_embeddings} rows, and "
            'the policy "none" evicts nothing; expected a larger capacity.'
        )
    slots = np.asarray(backend.find(directory, keys, here, method))
    slots = np.where(slots < 0, table.num_embeddings, slots)
    touched = directory.touched.reshape(-1).at[slots].set(part["touched"], mode="drop")
    directory = directory._replace(touched=touched.reshape(directory.touched.shape))
    state = {**state, **named_directory(directory)}
    return _with_rows(state, part, wanted, slots, method), evicted + refused


def _put_back(
    table: HashTable,
    state: dict[str, Any],
    part: Mapping[str, np.ndarray],
    wanted: Mapping[str, Any],
    method: str,
    path: str,
) -> dict[str, Any]:
    """The state with the keys of one file in the slots that they had."""
    directory, slots = directory_of(state), part["slot"]
    at, way = np.divmod(slots, table.ways)
    words, scores = (_words(part[name]) for name in ("key", "score"))
    homes = np.stack(jax.jit(homes_of, static_argnums=1)(words, table.sets))
    fits = (homes == at).any(axis=0).all() and np.unique(slots).size == slots.size
    if not fits or (part["touched"] <= 0).any() or np.asarray(directory.touched)[at, way].any():
        raise FileError(f"{path}: is damaged; keys are in slots that they cannot have.")
    directory = directory._replace(
        keys=directory.keys.at[at, :, way].set(words),
        scores=directory.scores.at[at, :, way].set(scores),
        touched=directory.touched.at[at, way].set(part["touched"]),
    )
    return _with_rows({**state, **named_directory(directory)}, part, wanted, slots, method)


def _words(integers: np.ndarray) -> np.ndarray:
    """uint64 ``[n]`` as uint32 ``[n, 2]``, high and low word."""
    return np.asarray(split_keys(integers).digits).view(np.uint32)


def _with_rows(
    state: dict[str, Any],
    part: Mapping[str, np.ndarray],
    wanted: Mapping[str, Any],
    slots: np.ndarray,
    method: str,
) -> dict[str, Any]:
    """The state with the rows of keys in their slots; those of no slot are left out."""
    # Slots in ascending order, as `exchange` takes them.
    order = np.argsort(slots, kind="stable")
    new = [
        jnp.asarray(part[name][order] if name in part else value, state[name].dtype)
        for name, value in wanted.items()
    ]
    arrays = _written([state[name] for name in wanted], new, slots[order], method)
    return {**state, **dict(zip(wanted, arrays, strict=True))}


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _written(arrays: Any, new: Any, slots: jax.Array, method: str) -> Any:
    return backend.exchange(arrays, new, slots, method, return_old=False)[0]


def _with_own_rows(table: Any) -> HashTable:
    table = require_hash_table(table)
    if not table.table.row_names:
        raise TypeError(
            f"{table.label}table: the rows of its {type(table.table).__name__} share parameters; expected a "
            "hash_table. Save its state like that of any table: its shapes do not change."
        )
    return table


def _rest_names(table: HashTable) -> set[str]:
    """The arrays that do not belong to single keys of the table."""
    return {*table.trained_shapes, *table.hash_shapes} - {*table.table.row_arrays, *KEYS}
