"""Tables with tiers in files: the arrays beside the rows as bytes, and dumps of all rows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import mismatch
from jax_tt._base.progress import Progress
from jax_tt._collection.collection import Collection, States
from jax_tt._directories.batch_clock import LAST
from jax_tt._directories.hash_directory import CLOCK, KEYS
from jax_tt._directories.placing import ENTRY
from jax_tt._formats.dump import Dump
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._jax.on_host import on_all, on_host
from jax_tt._kinds.hashed.change import growth_to
from jax_tt._kinds.hashed.table import unsharded_hash_table
from jax_tt._ops.changes import (
    HELD,
    Digests,
    changes_since,
    check_follows,
    digests_of,
    held_by,
    joined_digests,
    staying,
    summed,
)
from jax_tt._ops.dump_content import Content, Target
from jax_tt._table.change import grow
from jax_tt._table.checkpoint import by_row, in_pieces, of_pieces, of_rows, pieces
from jax_tt._table.sharding import rows_to_shard
from jax_tt._table.wrapper import is_sharded
from jax_tt._tiers.disk import StoreError
from jax_tt._tiers.lives import LIFE, Lives
from jax_tt._tiers.table import TieredRows

# Before the names of arrays of a dump that say what is known of keys, and rows whose digests are computed at once.
_LIVES, _CHUNK = "tier_", 1 << 18
# Rows of a table beside tiers that are copied to every device at once.
_BLOCK = 1 << 16


def rows_on_host(table: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a table beside tiers, by row; no device has all rows of a sharded one."""
    if not is_sharded(table) or table.ids.takes_keys:
        return {name: _rows_of_all(array) for name, array in by_row(table, arrays).items()}
    rows = rows_to_shard(table.table)
    return {
        name: _rows_of_all(array)[: table.num_embeddings] if name in rows else array
        for name, array in in_pieces(table, arrays).items()
    }


def _rows_of_all(array: Any) -> np.ndarray:
    """The array, of which a device gets no more than a block of rows at once."""
    of_others = isinstance(array, jax.Array) and not array.is_fully_addressable
    if not of_others or array.is_fully_replicated or not array.ndim:
        return on_host(array)
    rows, size = np.empty(array.shape, array.dtype), min(len(array), _BLOCK)
    for first in range(0, len(array), _BLOCK):
        first = min(first, len(array) - size)
        rows[first : first + size] = on_host(_block(array, first, size))
    return rows


@partial(jax.jit, static_argnums=2)
def _block(array: jax.Array, first: Any, size: int) -> jax.Array:
    def cut(given: tuple[jax.Array, Any]) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(*given, size)

    return over_explicit_axes(cut, (array, first), P())


def rows_from_host(table: Any, saved: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The inverse of `rows_on_host` for a sharded table, of arrays on the host."""
    if table.ids.takes_keys:
        return of_rows(table, {name: jnp.asarray(value) for name, value in saved.items()})
    like, everywhere = pieces(table), NamedSharding(table.mesh, P())
    rows = rows_to_shard(table.table)
    return of_pieces(
        table,
        {
            name: _in_pieces(value, like[name]) if name in rows else on_all(value, everywhere)
            for name, value in saved.items()
        },
    )


def _in_pieces(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Rows on the devices of ``like``, which may have more of them; these are zero."""

    def piece(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(like.shape[0])
        given = value[first:last]
        return np.concatenate(
            [given, np.zeros((last - first - len(given), *value.shape[1:]), value.dtype)]
        )

    return jax.make_array_from_callback(like.shape, like.sharding, piece)


def check_like(
    saved: Mapping[str, Mapping[str, Any]], like: Mapping[str, Mapping[str, Any]], path: str
) -> None:
    """Raises unless saved arrays have the names, shapes and types of others."""
    got, expected = _described(saved), _described(like)
    for table, name in sorted(got.keys() | expected.keys()):
        pair = got.get((table, name)), expected.get((table, name))
        if pair[0] != pair[1]:
            held, own = (one or "nothing" for one in pair)
            fix = "Describe the tables as they were when they were saved; they can be changed after that."
            label = f"{path}: {name!r} of {table!r}"
            raise mismatch(label, held, f"{own}, as the collection has it", fix, StoreError)


def grown_as_saved(
    collection: Collection, state: States, saved: Mapping[str, Mapping[str, Any]], path: str
) -> tuple[Collection, dict[str, dict[str, Any]]]:
    """The collection and a state of it whose hash tables have grown to the capacities of saved arrays."""
    tables, after = dict(collection.tables), {name: dict(own) for name, own in state.items()}
    for name, table in collection.tables.items():
        capacity = np.size(saved.get(name, {}).get(KEYS[2], ()))
        if not table.ids.takes_keys or capacity <= table.num_embeddings:
            continue
        try:
            growth = growth_to(unsharded_hash_table(table), capacity)
            tables[name], after[name] = grow(table, after[name], growth)
        except ValueError as error:
            raise StoreError(f"{path}: holds {name!r} with {capacity} rows; {error}") from error
    return dataclasses.replace(collection, tables=tables), after


def _described(arrays: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    return {
        (table, name): f"{jnp.result_type(x)} of shape {jnp.shape(x)}"
        for table, by_name in arrays.items()
        for name, x in by_name.items()
    }


def lives_arrays(lives: Lives) -> dict[str, np.ndarray]:
    """The ages of rows and of keys that wait, as arrays by name."""
    clock, rows, waiting = lives.loaded()
    arrays = {"clock": np.array(clock)}
    for kind, entries in ("row", rows), ("waiting", waiting):
        arrays |= {f"{kind}_{name}": entries[name] for name in LIFE.names or ()}
    return arrays


def put_lives(lives: Lives, arrays: Mapping[str, np.ndarray], *, alone: bool = True) -> None:
    """Sets what `lives_arrays` returned, ``alone`` in place of what is known or beside it."""
    both = []
    for kind in "row", "waiting":
        entries = np.zeros(len(arrays[f"{kind}_key"]), LIFE)
        for name in LIFE.names or ():
            entries[name] = arrays[f"{kind}_{name}"]
        both.append(entries)
    if alone:
        lives.clear()
    lives.put(int(arrays["clock"]), *both)


def dump_tier(
    rows: TieredRows, state: Mapping[str, Any], target: Target, since: str | os.PathLike[str] | None
) -> int:
    """Writes all rows of a table or what has changed, and the other arrays of its state; see `Tiers.dump`."""
    with rows.together():
        target.check(*([] if since is None else [since]))
    names = rows.layout.names
    # In this order the files do not depend on where the rows are, so that a dump that was cut off goes on.
    entries, others = _entries(rows)
    rest, base = rows.rest(state) | others, None

    def content_of(part: slice) -> dict[str, np.ndarray]:
        return dict(zip(names, rows.entries(state, entries["key"][part], names), strict=True))

    read = content_of
    if since is None and rows.processes.alone:
        # They are read with the last part, so that all rows are read once.
        sums = dict.fromkeys(_digests(entries[:0], rows.layout.empty(0), rows), 0)
        noted = np.zeros(len(entries), np.uint64)
        held = dict(zip(HELD, (entries["key"], noted), strict=True))

        def read(part: slice) -> dict[str, np.ndarray]:
            arrays = content_of(part)
            digests = _digests(entries[part], [*arrays.values()], rows)
            noted[part] = joined_digests(*digests.values())
            for name, total in summed(digests).items():
                sums[name] = (sums[name] + total) % 2**64
            return arrays
    else:
        digests = _all_digests(rows, state, entries, target.rows_per_file)
        sums, held = summed(digests), held_by(entries, digests)
        if since is not None:
            with rows.together():
                base = Dump.open(since)
                base.check(rows.features, list(names), exact=True)
                entries, held = changes_since(base, held, entries)
    holders = None
    if not rows.processes.alone:
        # One process after the other, each with its keys in their order.
        holders = rows.holders(state, entries["key"])
        order = np.argsort(holders, kind="stable")
        entries, holders = entries[order], holders[order]
    about = {"digests": sums, "base": base and base.digests}
    about["since"] = None if since is None else os.fsdecode(since)
    of_keys = {name: entries[name] for name in ("key", "score", "touched")}
    dtypes = {name: str(state[name].dtype) for name in names}
    content = Content(rows.features, of_keys, dtypes, read, rest | held, about, processes=holders)
    return target.write(content, rows.processes)


def load_tier(
    rows: TieredRows, state: Mapping[str, Any], path: str | os.PathLike[str], progress: bool
) -> dict[str, np.ndarray]:
    """Puts the rows of a dump into host memory and on disk; returns its other arrays. See `Tiers.load_dump`."""
    with rows.together():
        dump, layout = Dump.open(path), rows.layout
        dump.check(rows.features, list(layout.names), exact=True)
        of_keys = [np.zeros(0, ENTRY)]
        for part in dump.parts({}):
            of_keys.append(np.zeros(len(part["key"]), ENTRY))
            for name in ("key", "score", "touched"):
                of_keys[-1][name] = part[name]
    new, leaving = np.concatenate(of_keys), np.zeros(0, np.uint64)
    if dump.base is not None:
        held, _ = _entries(rows)
        digests = _all_digests(rows, state, held, _CHUNK)
        label = f"tiers[{rows.name!r}]: "
        # What is known of the keys is that of the dump afterwards, whatever it was.
        check_follows(dump, label, digests, held["key"], new["key"], without=("keys",))
        stay = staying(dump, held, same_sets=False)["key"]
        leaving = np.setdiff1d(held["key"], np.concatenate([stay, new["key"]]))
    with (
        rows.replacing(new["key"], leaving),
        rows.together(),
        Progress(progress, "load_dump", len(dump.files)) as bar,
    ):
        for part in dump.parts(dict(zip(layout.names, layout.shapes, strict=True))):
            pairs = zip(layout.names, layout.dtypes, strict=True)
            rows.put(part["key"], [part[name].astype(dtype) for name, dtype in pairs])
            bar.step()
        if rows.lives is not None:
            _put_dumped(rows.lives, dump, new)
        return dump.rest(state)


def _put_dumped(lives: Lives, dump: Dump, entries: np.ndarray) -> None:
    """Sets what a dump knows of its keys, and of the keys that wait."""
    given = dump.rest([_LIVES + name for name in lives_arrays(lives)])
    if given:
        arrays = {name.removeprefix(_LIVES): array for name, array in given.items()}
        put_lives(lives, arrays, alone=dump.base is not None)
        return
    # Of another kind of table, which has no requests unless they are its scores.
    rows = np.zeros(len(entries), LIFE)
    rows["key"], rows["touched"], rows["requests"] = entries["key"], entries["touched"], 1
    clock = dump.rest([CLOCK]).get(CLOCK, np.array(rows["touched"].max(initial=0)))
    lives.put(int(clock), rows, np.zeros(0, LIFE))


def _entries(rows: TieredRows) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All keys with their scores and last batches in their order, and arrays of what is known of them."""
    entries = np.zeros(len(keys := rows.keys()), ENTRY)
    entries["key"], entries["touched"], entries["slot"] = keys, 1, -1
    if rows.lives is None:
        return entries, {}
    clock, known, _ = rows.lives.loaded()
    # Batches beyond 32 bits are set back.
    back = max(0, clock - LAST)
    touched = np.maximum(known["touched"] - back, 1)
    entries["touched"] = touched
    entries["score"] = known["requests"] if rows.tier.policy == "lfu" else touched
    arrays = {_LIVES + name: array for name, array in lives_arrays(rows.lives).items()}
    # A hash table goes on with this number of batches.
    return entries, arrays | {CLOCK: np.array(max(clock - back, 1), np.int32)}


def _digests(entries: np.ndarray, arrays: list[np.ndarray], rows: TieredRows) -> Digests:
    """Digests of keys and their rows, which are entry by entry in the arrays."""
    of_part = entries.copy()
    of_part["slot"] = np.arange(len(entries))
    named = {
        name: jnp.asarray(array) for name, array in zip(rows.layout.names, arrays, strict=True)
    }
    return digests_of(of_part, named, rows.layout.names)


def _all_digests(
    rows: TieredRows, state: Mapping[str, Any], entries: np.ndarray, size: int
) -> Digests:
    """Digests of all keys and their rows, of which ``size`` are read at once."""
    names = rows.layout.names
    here = rows.holders(state, entries["key"]) == jax.process_index()
    mine, parts = entries[here], [_digests(entries[:0], rows.layout.empty(0), rows)]
    with rows.together():
        for first in range(0, len(mine), size):
            part = mine[first : first + size]
            parts.append(_digests(part, rows.entries(state, part["key"], names), rows))
    digests = {}
    for name in parts[0]:
        digests[name] = np.zeros(len(entries), np.uint64)
        digests[name][here] = np.concatenate([part[name] for part in parts])
    return {name: rows.processes.merged(array) for name, array in digests.items()}
