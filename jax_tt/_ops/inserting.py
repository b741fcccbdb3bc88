"""Insertion of keys on one device, for one table or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import get_abstract_mesh

from jax_tt._base import words as _words
from jax_tt._base.arguments import as_array, mismatch, one_of
from jax_tt._directories.admission import AdmitAfter, AdmitWithProbability
from jax_tt._directories.batch_clock import counted_on, numbers_of_batches
from jax_tt._directories.hash_directory import (
    CLOCK,
    COUNTERS,
    OF_WAITING,
    SEED,
    TOTALS,
    WAITING,
    WITHIN_EPOCHS,
    Check,
    Insertion,
    KeyDirectory,
    directory_of,
    named_directory,
)
from jax_tt._directories.hash_reference import erase, scored, scores_of
from jax_tt._directories.initial import InitialRows, threefry
from jax_tt._ids.bags import Bags
from jax_tt._ids.batch import present
from jax_tt._ids.id_space import Slots
from jax_tt._ids.inputs import bag_batch, lookup_batch
from jax_tt._ids.keys import keys_of, score_words
from jax_tt._ids.offsets import Treatment, entered_batches
from jax_tt._jax.on_host import own_constants
from jax_tt._kinds.hashed.table import HashTable, initial_of_tables, unsharded_hash_table
from jax_tt._lookup.offsets import offsets_label
from jax_tt._native import hash_backend
from jax_tt._native.hash import Clock, Entry, ExchangeCall, Reset, Search
from jax_tt._table.options import BOUNDS, Lookup
from jax_tt._table.state import State
from jax_tt._table.wrapper import is_sharded

_NO_ROOM = (
    "{{count}} new keys of a batch found no room in their sets of the table, which has {} rows. They read their "
    "initial values and train nothing. Raise the capacity, let the table grow (jax_tt.dynamic.grow_if_full), or choose "
    "a policy that evicts. safe_check='ignore' gives no warning."
)


class Evicted(NamedTuple):
    """Keys that lost their row; entries with ``touched`` 0 are empty, and unspecified otherwise.

    Attributes:
        keys: uint32 ``[n, 2]``, high and low word, of which `dynamic.join_keys` makes integers.
        scores: uint32 ``[n, 2]``, high and low word.
        touched: int32 ``[n]``, the number of the last batch that requested the key.
        arrays: the row and its optimizer state by the name of the array in the state, ``[n, ...]`` in its type; empty
            if the rows of the table share parameters.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(8, 8, ways=8)
    >>> _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.arange(8))
    >>> inserted, state = jax_tt.dynamic.insert(table, state, np.array([99]), return_evicted=True)
    >>> inserted.evicted.keys.tolist(), inserted.evicted.arrays["embedding"].shape
    ([[0, 0]], (1, 8))
    """

    keys: Any
    scores: Any
    touched: Any
    arrays: dict[str, Any]


class Inserted(NamedTuple):
    """What an insertion did; ``n`` is the number of ids of the batch.

    Attributes:
        slots: `pipeline.Slots` ``[n]``, those of new keys in ascending order, then the capacity; None where the table
            is sharded.
        keys: uint32 ``[n, 2]``, the new keys, high and low word; None as well.
        counts: int32 scalars by name: ``"requests"`` and ``"hits"`` are ids, ``"unique"``, ``"unique_hits"``,
            ``"inserted"``, ``"evicted"`` and ``"refused"`` distinct keys. Refused ones found no room; the others that
            were neither there nor inserted were not admitted.
        found: `pipeline.Slots` ``[n]``, one of every id of the batch, -1 for those without one; None for sharded
            tables; of a collection by feature. See `with_slots`.
        evicted: `Evicted` ``[n]``, beside the new keys in the same slots; of a sharded table in front of the empty
            entries, the keys of the first device first, on all devices. None unless asked for.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(64, 8)
    >>> inserted, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.array([7, 7, 3]))
    >>> sorted(inserted.keys[:2, 1].tolist())
    [3, 7]
    """

    slots: Any
    keys: Any
    counts: dict[str, Any]
    found: Any
    evicted: Evicted | None = None


class KeyRequests(NamedTuple):
    """The requests of a batch.

    Attributes:
        keys: uint32 ``[n, 2]``.
        here: which positions count, bool ``[n]``.
        given: scores, uint32 ``[n, 2]``.
        counts: how many requests every position stands for, int32 ``[n]``, 0 where it does not count; None for one
            each. Where the table `counts_requests`, positions with counts have different keys.
    """

    keys: Any
    here: Any
    given: Any
    counts: Any = None


def joined(parts: Sequence[KeyRequests]) -> KeyRequests:
    """Joins the requests of several parts of a batch."""
    return jax.tree.map(lambda *one: jnp.concatenate(one), *parts)


class InsertRequest(NamedTuple):
    """What to insert into a hash table, or into a `ShardedTable` of one.

    ``parts`` are one batch; each of them is sharded over devices by itself. ``epoch`` is the present one, or None.
    ``axis_name`` are mesh axes that the batch is sharded over, if JAX does not track them. ``refused`` says whether
    nothing is inserted or counted, bool, because offsets are malformed; None if that cannot be.
    """

    table: Any
    state: State
    parts: Sequence[KeyRequests]
    epoch: Any
    axis_name: Any = None
    refused: jax.Array | None = None


def treatment_of_keys(table: Any, bounds: str, method: str) -> Treatment:
    """What is done about malformed offsets of keys to insert or remove."""
    one_of("bounds", bounds, BOUNDS)
    return Treatment(bounds, method, is_sharded(table) or bool(get_abstract_mesh().manual_axes))


def key_requests(
    table: HashTable, ids: Any, scores: Any, how: Treatment
) -> tuple[KeyRequests, jax.Array | None]:
    """The requests of the ids of a batch, and `InsertRequest.refused`."""
    with own_constants():
        keys, here, refused = keys_of_ids(table, ids, how)
        if (table.policy == "custom") != (scores is not None):
            got = f"{'None' if scores is None else 'an array'} for the policy {table.policy!r}"
            expected = "one integer per id" if scores is None else "None"
            fix = "Scores belong to policy='custom'."
            raise mismatch(f"{table.ids.label}scores", got, expected, fix)
        if scores is None:
            return KeyRequests(keys, here, jnp.zeros_like(keys)), refused
        words = jnp.asarray(score_words(f"{table.ids.label}scores", scores, _shape(ids))).reshape(
            -1, 2
        )
        return KeyRequests(keys, here, jax.lax.bitcast_convert_type(words, jnp.uint32)), refused


def keys_of_ids(
    table: HashTable, ids: Any, how: Treatment
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Keys uint32 ``[n, 2]``, which positions count, bool ``[n]``, and whether the offsets of bags are refused."""
    is_bags = isinstance(ids, Bags)
    batch = (
        bag_batch(table.ids, ids, jnp.float32)[0] if is_bags else lookup_batch(table.ids, ids)[0]
    )
    (batch,), refused = entered_batches([batch], [offsets_label(table)], how)
    return keys_of(batch), present(batch).reshape(-1), refused


class _Insertion(NamedTuple):
    """An insertion into one table before its call.

    Attributes:
        state: after the batch, as far as it is known: the directory of waiting keys and the clock.
        now, epoch: the number of the batch, and the present epoch.
        method: resolved.
        slots: of the keys before the insertion, -1 for new ones; None where they are not needed.
        admitted: positions to insert, bool ``[n]``.
        missed: requests and distinct keys that were not in the table, where not all of these are inserted.
    """

    table: HashTable
    state: dict[str, Any]
    requests: KeyRequests
    now: Any
    epoch: Any
    method: str
    slots: Any
    admitted: Any
    missed: tuple[Any, Any] | None = None


def with_clock_counted_on(asked: Sequence[InsertRequest], method: str) -> list[InsertRequest]:
    """Counts on from an earlier batch where the numbers of batches of a table come to their end."""
    words = [numbers_of_batches(one.state, unsharded_hash_table(one.table).policy) for one in asked]
    clocks = [
        Clock(one.state[CLOCK], [one.state[name] for name in names], tuple(names.values()))
        for one, names in zip(asked, words, strict=True)
    ]
    methods = [one.table.execution(Lookup(method=method), one.state).method for one in asked]
    after = [
        dict(zip(names, arrays, strict=True))
        for names, arrays in zip(words, hash_backend.set_back_many(clocks, methods), strict=True)
    ]
    return [
        one._replace(state={**one.state, **arrays, CLOCK: counted_on(one.state[CLOCK])})
        for one, arrays in zip(asked, after, strict=True)
    ]


def insert_together(
    asked: Sequence[InsertRequest], method: str, return_evicted: bool
) -> list[tuple[Inserted, dict[str, Any]]]:
    """`dynamic.insert` of several tables, in one native call per op."""
    begun = _admit(_find([_begin(one, method) for one in asked]))
    methods = [one.method for one in begun]
    entries = [_entry(one, return_evicted) for one in begun]
    results = []
    for one, (directory, done) in zip(
        begun, hash_backend.insert_many(entries, methods), strict=True
    ):
        counts = _counts(one, done)
        total = jnp.stack(list(counts.values())).astype(jnp.uint32)
        totals = {TOTALS: _words.added(one.state[TOTALS], total)}
        results.append(({**one.state, **named_directory(directory), **totals}, done, counts))
    reset = _reset(
        [(one.table, *r[:2]) for one, r in zip(begun, results, strict=True)],
        methods,
        return_evicted,
    )
    return [
        (_inserted(done, counts, old if return_evicted else None), state)
        for (state, old), (_, done, counts) in zip(reset, results, strict=True)
    ]


def _begin(asked: InsertRequest, method: str) -> _Insertion:
    table, state, parts, epoch, *_ = asked
    method = table.execution(Lookup(method=method), state).method
    now = state[CLOCK] + 1
    requests = jax.lax.stop_gradient(joined(parts))
    epoch = epoch_of(table, epoch)
    state = {**state, CLOCK: now}
    return _Insertion(table, state, requests, now, epoch, method, None, requests.here)


def _find(begun: Sequence[_Insertion]) -> list[_Insertion]:
    """Finds the slots of keys, where an insertion needs them before."""
    needed = [
        k
        for k, one in enumerate(begun)
        if one.table.admission is not None or one.requests.counts is not None
    ]
    searches = [
        Search(directory_of(one.state), one.requests.keys, one.requests.here)
        for one in (begun[k] for k in needed)
    ]
    after = list(begun)
    slots = hash_backend.find_many(searches, [begun[k].method for k in needed])
    for k, one in zip(needed, slots, strict=True):
        after[k] = begun[k]._replace(slots=one)
    return after


def _entry(insertion: _Insertion, return_old: bool) -> Entry:
    table, (keys, _, given, counts) = insertion.table, insertion.requests
    check = Check(table.safe_check, no_room(table))
    directory = directory_of(insertion.state)
    batch = directory, keys, insertion.admitted, given, insertion.now, insertion.epoch
    entry = Entry(*batch, table.eviction, return_old, check)
    return entry if counts is None else _counted(entry, counts, insertion.slots)


def _counted(entry: Entry, counts: jax.Array, slots: jax.Array) -> Entry:
    """An insertion of different keys with several requests each, for ops that count every position once.

    Where the score counts requests, it is given: the score that these keys have after the batch.
    """
    eviction = entry.eviction
    if not eviction.counts_requests:
        return entry
    before = scores_of(entry.directory, slots)
    given = scored(before, counts, entry.given, entry.now, entry.epoch, eviction.policy)
    return entry._replace(given=given, eviction=eviction._replace(policy="custom"))


def no_room(table: HashTable) -> str:
    """The message about keys that found no room."""
    return f"{table.ids.label}ids: {_NO_ROOM.format(table.num_embeddings)}"


def _inserted(done: Insertion, counts: dict[str, Any], old: dict[str, Any] | None) -> Inserted:
    evicted = None
    if old is not None:
        evicted = Evicted(done.old_keys, done.old_scores, done.old_touched, old)
    return Inserted(Slots(done.slots), done.keys, counts, Slots(done.found), evicted)


def _shape(ids: Any) -> tuple[int, ...]:
    ids = ids.ids if isinstance(ids, Bags) else ids
    return tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)


def _reset(
    tables: Sequence[tuple[HashTable, dict[str, Any], Insertion]],
    methods: Sequence[str],
    return_old: bool,
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Writes initial rows and optimizer state to the slots of new keys; returns the states and the old arrays."""
    in_slots: dict[tuple[int, str], Any] = {} if return_old else _initial_in_slots(tables, methods)
    rest = [
        {
            name: value
            for name, value in table.table.spec.row_arrays.items()
            if (k, name) not in in_slots
        }
        for k, (table, _, _) in enumerate(tables)
    ]
    of_rows = [
        (k, name) for k, one in enumerate(rest) for name, value in one.items() if value is None
    ]
    fresh = iter(
        initial_of_tables(
            [
                (table, state, done.keys, done.slots < table.num_embeddings, state[name].dtype)
                for k, name in of_rows
                for table, state, done in [tables[k]]
            ],
            [methods[k] for k, _ in of_rows],
        )
    )
    exchanges = [
        ExchangeCall(
            [state[name] for name in one],
            [next(fresh) if value is None else value for value in one.values()],
            done.slots,
            return_old,
        )
        for one, (_, state, done) in zip(rest, tables, strict=True)
    ]
    results = []
    changed = hash_backend.exchange_many(exchanges, methods)
    for k, ((_, state, _), one, (arrays, old)) in enumerate(
        zip(tables, rest, changed, strict=True)
    ):
        after = state | dict(zip(one, arrays, strict=True))
        after |= {name: array for (table, name), array in in_slots.items() if table == k}
        results.append((after, dict(zip(one, old, strict=True)) if return_old else {}))
    return results


def _initial_in_slots(
    tables: Sequence[tuple[HashTable, dict[str, Any], Insertion]], methods: Sequence[str]
) -> dict[tuple[int, str], Any]:
    """Writes initial rows to the slots of new keys where this needs no copy; returns arrays by table and name."""
    resets = {
        (k, name): Reset(state[name], state[SEED], done.keys, done.slots, table.initializer)
        for k, (table, state, done) in enumerate(tables)
        for name, value in table.table.spec.row_arrays.items()
        if value is None and isinstance(table.initializer, InitialRows)
    }
    arrays = hash_backend.reset_many(list(resets.values()), [methods[k] for k, _ in resets])
    return dict(zip(resets, arrays, strict=True))


def _admit(begun: Sequence[_Insertion]) -> list[_Insertion]:
    """Decides which keys the tables admit."""
    after = list(begun)
    counting = []
    for k, one in enumerate(begun):
        if isinstance(one.table.admission, AdmitAfter):
            counting.append(k)
        elif one.table.admission is not None:
            after[k] = _admit_by_chance(one)
    methods = [begun[k].method for k in counting]
    of_counts = [k for k in counting if begun[k].requests.counts is not None]
    searches = [
        Search(directory_of(one.state, WAITING), one.requests.keys, _missed(one))
        for one in (begun[k] for k in of_counts)
    ]
    slots = hash_backend.find_many(searches, [begun[k].method for k in of_counts])
    slots = dict(zip(of_counts, slots, strict=True))
    entries = [_waiting(begun[k], slots.get(k)) for k in counting]
    for k, (waiting, done) in zip(
        counting, hash_backend.insert_many(entries, methods), strict=True
    ):
        after[k] = _admit_after(begun[k], waiting, done)
    return after


def _missed(insertion: _Insertion) -> jax.Array:
    return insertion.requests.here & (insertion.slots < 0)


def _waiting(insertion: _Insertion, slots: jax.Array | None) -> Entry:
    """The insertion of keys that are not in the table into the directory of waiting keys.

    Their scores are the last batch and, in the low word, the requests. ``slots`` are the slots of keys that wait
    already, for requests with counts.
    """
    keys, now, counts = insertion.requests.keys, insertion.now, insertion.requests.counts
    given, epoch = jnp.zeros_like(keys), now.astype(jnp.uint32)
    batch = directory_of(insertion.state, WAITING), keys, _missed(insertion), given, now, epoch
    entry = Entry(*batch, OF_WAITING, return_old=False)
    return entry if slots is None else _counted(entry, counts, slots)


def _admit_after(insertion: _Insertion, waiting: KeyDirectory, done: Insertion) -> _Insertion:
    """Admits keys that have been requested often enough."""
    assert isinstance(insertion.table.admission, AdmitAfter)
    slots = done.found
    requests = scores_of(waiting, slots)[:, 1]
    least = np.uint32(min(insertion.table.admission.requests, 2**32 - 1))
    admitted = (slots >= 0) & (requests >= least)
    waiting = erase(waiting, jnp.where(admitted, slots, -1))
    counts = dict(zip(COUNTERS, done.counts, strict=True))
    return insertion._replace(
        state={**insertion.state, **named_directory(waiting, WAITING)},
        admitted=(insertion.slots >= 0) | admitted,
        missed=(counts["requests"], counts["unique"]),
    )


def _admit_by_chance(insertion: _Insertion) -> _Insertion:
    """Admits keys with a probability."""
    assert isinstance(insertion.table.admission, AdmitWithProbability)
    seed, keys = insertion.state[SEED], insertion.requests.keys
    missed = _missed(insertion)
    # Another key of the generator than that of initial rows, which is the seed itself.
    first, second = threefry(seed[0], seed[1], insertion.now.astype(jnp.uint32), jnp.uint32(1))
    bits, _ = threefry(first, second, keys[:, 0], keys[:, 1])
    most = np.uint32(max(int(insertion.table.admission.probability * 2**32) - 1, 0))
    by = (~missed, keys[:, 0], keys[:, 1])
    absent, high, low = jax.lax.sort(by, num_keys=3)
    new = jnp.ones(missed.shape, bool)
    new = new.at[1:].set((high[1:] != high[:-1]) | (low[1:] != low[:-1]))
    unique = jnp.sum(new & ~absent, dtype=jnp.int32)
    return insertion._replace(
        admitted=(insertion.slots >= 0) | (missed & (bits <= most)),
        missed=(jnp.sum(missed, dtype=jnp.int32), unique),
    )


def _counts(insertion: _Insertion, done: Insertion) -> dict[str, jax.Array]:
    """The counts by name, including requests and distinct keys that were not admitted."""
    counts: dict[str, jax.Array] = dict(zip(COUNTERS, done.counts, strict=True))
    if insertion.missed is not None:
        requests, unique = insertion.missed
        counts |= {
            "requests": counts["hits"] + requests,
            "unique": counts["unique_hits"] + unique,
        }
    given = insertion.requests.counts
    if given is not None:
        hits = jnp.sum(jnp.where(insertion.slots >= 0, given, 0))
        counts |= {"requests": jnp.sum(given), "hits": hits}
    return counts


def epoch_of(table: HashTable, epoch: Any) -> jax.Array:
    """The epoch of a batch as uint32 scalar, 0 for tables without epochs."""
    if (table.policy in WITHIN_EPOCHS) != (epoch is not None):
        expected = "an integer scalar" if epoch is None else "None"
        got = f"{epoch!r} for the policy {table.policy!r}"
        fix = "Epochs belong to the policies 'epoch_lru' and 'epoch_lfu'."
        raise mismatch(f"{table.ids.label}epoch", got, expected, fix)
    if epoch is None:
        return jnp.zeros((), jnp.uint32)
    array = as_array(f"{table.ids.label}epoch", epoch)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.integer):
        raise mismatch(f"{table.ids.label}epoch", array, "an integer scalar")
    if isinstance(array, np.ndarray) and not 0 <= int(array) < 2**31:
        raise ValueError(f"{table.ids.label}epoch: got {int(array)}; expected 0 to 2**31 - 1.")
    return jnp.maximum(jnp.asarray(array), 0).astype(jnp.uint32)
