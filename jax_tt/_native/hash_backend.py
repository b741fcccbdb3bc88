"""The ops of hash tables, on the reference or on a native module; chosen in the same way as the ops of tables.

Those with ``many`` in their name work on several tables, which is one native call for all tables with the same method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._directories import batch_clock, hash_reference
from jax_tt._directories.hash_directory import Eviction, Insertion, KeyDirectory, check_count
from jax_tt._directories.initial import initial_rows
from jax_tt._jax import backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.call import has_parts, types_in
from jax_tt._native.hash import (
    Clock,
    Entry,
    ExchangeCall,
    Fresh,
    Reset,
    Search,
    hash_double,
    hash_exchange,
    hash_find,
    hash_initial,
    hash_insert,
    hash_reset,
    hash_set_back,
)
from jax_tt._table.parts_of_arrays import SharedArrays, attached, detached, in_place_of, taken


def find_many(searches: Sequence[Search], methods: Sequence[str]) -> list[jax.Array]:
    """Slot of every key of each search; -1 at positions that are not present."""

    def native(searches: list[Search], platform: str) -> list[jax.Array]:
        found = hash_find(searches, platform=platform)
        if platform == "cpu":  # which checks them itself
            return found
        return [_checked(search, slots) for search, slots in zip(searches, found, strict=True)]

    def plain(search: Search) -> jax.Array:
        search = taken(search)
        slots = hash_reference.find(search.directory, search.keys, search.present)
        if search.guess is not None:
            holds = hash_reference.holds(search.directory, search.keys, search.guess)
            slots = jnp.where(search.present & (holds | (search.guess < 0)), search.guess, slots)
        return _checked(search, jnp.where(search.present & (slots < 0), search.absent, slots))

    return _many(native, plain, searches, 4, methods)


def insert_many(
    entries: Sequence[Entry], methods: Sequence[str]
) -> list[tuple[KeyDirectory, Insertion]]:
    """Finds or inserts the keys of a batch in each table; see `jax_tt._directories.hash_reference.insert`."""

    def native(entries: list[Entry], platform: str) -> list[tuple[KeyDirectory, Insertion]]:
        results = hash_insert(entries, platform=platform)
        if platform != "cpu":
            for entry, (_, done) in zip(entries, results, strict=True):
                _check_refused(entry, done)
        return results

    def plain(entry: Entry) -> tuple[KeyDirectory, Insertion]:
        after, done = hash_reference.insert(*taken(entry[:6]), **entry.eviction._asdict())
        after = KeyDirectory(*map(in_place_of, entry.directory, after))
        _check_refused(entry, done)
        if not entry.return_old:
            old = done.old_keys[:0], done.old_scores[:0], done.old_touched[:0]
            done = done._replace(old_keys=old[0], old_scores=old[1], old_touched=old[2])
        return after, done

    return _many(native, plain, entries, 6, methods)


def set_back_many(clocks: Sequence[Clock], methods: Sequence[str]) -> list[list[jax.Array]]:
    """The numbers of batches of each table; see `jax_tt._directories.batch_clock.set_back`."""

    def plain(one: Clock) -> list[jax.Array]:
        return list(map(in_place_of, one.arrays, batch_clock.set_back(*taken(one))))

    return _many(hash_set_back, plain, clocks, 2, methods)


def initial_many(asked: Sequence[Fresh], methods: Sequence[str]) -> list[jax.Array]:
    """Initial rows ``[n, features]`` of each table; what stands in rows that are not wanted is unspecified."""

    return _many(_native_initial, _plain_initial, asked, 3, methods)


def _native_initial(asked: list[Fresh], platform: str) -> list[jax.Array]:
    # The CUDA kernels store no float64.
    wide = [platform != "cpu" and jnp.dtype(one.dtype) == jnp.float64 for one in asked]
    others = [one for one, is_wide in zip(asked, wide, strict=True) if not is_wide]
    drawn = iter(hash_initial(others, platform=platform) if others else [])
    return [
        _plain_initial(one) if is_wide else next(drawn)
        for one, is_wide in zip(asked, wide, strict=True)
    ]


def _plain_initial(one: Fresh) -> jax.Array:
    rows = initial_rows(one.distribution, one.seed, one.keys, one.features)
    return rows.astype(jnp.dtype(one.dtype))


def reset_many(resets: Sequence[Reset], methods: Sequence[str]) -> list[jax.Array]:
    """The rows of each table with initial rows in some slots, which are nowhere else on the CPU."""

    def exchanged(one: Reset, initial: jax.Array) -> ExchangeCall:
        return ExchangeCall([one.rows], [initial], one.slots, return_old=False)

    def plain(one: Reset) -> jax.Array:
        call = taken(exchanged(one, _plain_initial(_fresh(one))))
        return in_place_of(one.rows, hash_reference.exchange(*call[:3])[0][0])

    def native(resets: list[Reset], platform: str) -> list[jax.Array]:
        if platform == "cpu":
            return hash_reset(resets)
        initial = _native_initial([_fresh(one) for one in resets], platform)
        exchanges = [exchanged(*pair) for pair in zip(resets, initial, strict=True)]
        return [array for (array,), _ in hash_exchange(exchanges, platform=platform)]

    return _many(native, plain, resets, 4, methods, differentiable=True)


def _fresh(one: Reset) -> Fresh:
    wanted = one.slots < one.rows.shape[0]
    return Fresh(one.seed, one.keys, wanted, one.distribution, one.rows.shape[1], one.rows.dtype)


def exchange_many(
    exchanges: Sequence[ExchangeCall], methods: Sequence[str]
) -> list[tuple[list[jax.Array], list[jax.Array]]]:
    """Exchanges entries of the arrays of each table; see `jax_tt._directories.hash_reference.exchange`."""

    def plain(one: ExchangeCall) -> Any:
        changed, old = hash_reference.exchange(taken(one.arrays), one.new, one.slots)
        changed = list(map(in_place_of, one.arrays, changed))
        return changed, old if one.return_old else []

    def native(exchanges: list[ExchangeCall], platform: str) -> Any:
        return hash_exchange(exchanges, platform=platform)

    exchanges = [
        one._replace(
            arrays=list(one.arrays),
            new=[jnp.asarray(x, array.dtype) for x, array in zip(one.new, one.arrays, strict=True)],
        )
        for one in exchanges
    ]
    return _many(native, plain, exchanges, 3, methods, differentiable=True)


def find(directory: KeyDirectory, keys: jax.Array, present: jax.Array, method: str) -> jax.Array:
    """Slot of every key; see `jax_tt._directories.hash_reference.find`."""
    (slots,) = find_many([Search(directory, keys, present)], [method])
    return slots


def insert(
    directory: KeyDirectory,
    keys: jax.Array,
    present: jax.Array,
    given: jax.Array,
    now: jax.Array,
    epoch: jax.Array,
    eviction: Eviction,
    method: str,
) -> tuple[KeyDirectory, Insertion]:
    """Finds or inserts the keys of a batch; see `jax_tt._directories.hash_reference.insert`."""
    entry = Entry(directory, keys, present, given, now, epoch, eviction)
    (result,) = insert_many([entry], [method])
    return result


def exchange(
    arrays: Sequence[jax.Array],
    new: Sequence[jax.Array],
    slots: jax.Array,
    method: str,
    *,
    return_old: bool,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """`exchange_many` of one table."""
    (result,) = exchange_many([ExchangeCall(arrays, new, slots, return_old)], [method])
    return result


def double(
    directory: KeyDirectory, arrays: Sequence[jax.Array], method: str
) -> tuple[KeyDirectory, list[jax.Array]]:
    """Doubles the sets of a directory, with the arrays ``[capacity, ...]`` beside it.

    Keys move as in `jax_tt._directories.hash_reference.doubled`, and their entries with them; the other entries are 0.
    """

    def plain(directory: KeyDirectory, arrays: Any) -> Any:
        after, source = hash_reference.doubled(directory)
        source = jnp.where(source < 0, directory.capacity, source)
        return after, [x.at[source].get(mode="fill", fill_value=0) for x in arrays]

    def native(platform: str, *args: Any) -> Any:
        return vary_over(hash_double(*args, platform=platform), varying_axes(args))

    return backend.run(backend.choose(method), native, plain, directory, list(arrays))


def _many(
    native: Callable[..., list[Any]],
    plain: Callable[..., Any],
    tables: Sequence[Any],
    arrays: int,
    methods: Sequence[str],
    differentiable: bool = False,
) -> list[Any]:
    """``native(tables, platform)``, or ``plain(table)`` of each, for all tables with the same method.

    The first ``arrays`` fields of a table hold arrays, the others are static. With ``differentiable``, what is native
    has the derivative of ``plain``; a function that is differentiated may insert rows.
    """
    by_method: dict[str, list[int]] = {}
    for k, method in enumerate(methods):
        by_method.setdefault(backend.choose(method), []).append(k)
    found: dict[int, Any] = {}
    for method, members in by_method.items():
        given = [tables[k][:arrays] for k in members]
        one = types_in([tables[k] for k in members])
        # JAX does not know that the result of a native call varies over mesh axes.
        axes = list(map(varying_axes, given))

        def on_platform(
            platform: str,
            given: Any,
            shared: SharedArrays,
            one: list[Any] = one,
            axes: list[Any] = axes,
        ) -> Any:
            given = attached(given, shared) if shared else given
            results = native(_filled(one, given), platform=platform)
            results = [vary_over(*pair) for pair in zip(results, axes, strict=True)]
            return detached(results) if shared else (results, {})

        def anywhere(given: Any, shared: SharedArrays, one: list[Any] = one) -> Any:
            results, after = [], {}
            for table in _filled(one, given):
                # What one table changes in a stack, the next one finds there.
                result, changed = detached(plain(attached(table, {**shared, **after})))
                results.append(result)
                after |= changed
            return results, after

        run = _with_derivative(on_platform, anywhere) if differentiable else on_platform
        detach = detached(given) if has_parts(given) else (given, {})
        results, after = backend.run(method, run, anywhere, *detach)
        results = attached(results, after) if after else results
        found.update(zip(members, results, strict=True))
    return [found[k] for k in range(len(tables))]


def _with_derivative(native: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def on_platform(platform: str, *given: Any) -> Any:
        run = jax.custom_jvp(partial(native, platform))
        run.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
        return run(*given)

    return on_platform


def _filled(tables: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The calls with other arrays."""
    pairs = zip(tables, given, strict=True)
    return [type(table)(*arrays, *table[len(arrays) :]) for table, arrays in pairs]


def _checked(search: Search, slots: jax.Array) -> jax.Array:
    """The slots; what `Search.check` asks for is said of the keys that are not there."""
    missing = search.present & (slots == search.absent)
    if search.guess is not None:
        missing &= search.guess >= 0
    check_count(search.check, jnp.sum(missing, dtype=jnp.int32))
    return slots


def _check_refused(entry: Entry, done: Insertion) -> None:
    check_count(entry.check, done.counts[-1])
