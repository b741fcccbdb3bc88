"""`dynamic.insert`: gives the keys of a batch a row, before the batch is looked up."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._directories.hash_directory import CLOCK, KEYS
from jax_tt._ids.bags import Bags
from jax_tt._ids.explicit import reshape_like
from jax_tt._ids.id_space import Slots
from jax_tt._ids.keys import LocatedKeys, key_digits
from jax_tt._jax.on_host import own_constants
from jax_tt._jax.vma import all_shards, axes_to_count, own_shard
from jax_tt._kinds.hashed.table import HashTable, checked_hash_table, clock_of_whole
from jax_tt._lookup.offsets import refusals
from jax_tt._ops.insert_sharded import insert_over_devices
from jax_tt._ops.inserting import (
    Inserted,
    InsertRequest,
    KeyRequests,
    insert_together,
    joined,
    key_requests,
    treatment_of_keys,
    with_clock_counted_on,
)
from jax_tt._table.options import DEFAULT_BOUNDS
from jax_tt._table.state import State
from jax_tt._table.table import scope_of
from jax_tt._table.wrapper import is_sharded


@functools.singledispatch
def insert_keys(
    table: HashTable,
    state: State,
    ids: Any,
    *,
    scores: Any = None,
    epoch: Any = None,
    method: str = "auto",
    bounds: Any = DEFAULT_BOUNDS,
    return_evicted: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Finds or inserts the keys of a batch, which counts as one request for each of its ids.

    Call it before the lookup of the batch, outside of what is differentiated; under ``jit`` with a donated state it
    changes the state in place. The result does not depend on the order of the ids.

    Args:
        table: the `HashTable`, or a `ShardedTable` of one; or a `Collection`, whose features of one table are one batch
            of it.
        state: its arrays by name; of a collection, by table and name.
        ids: keys of any shape, or `Bags` of them, of which padding and unused positions do not count. For a collection
            its batch, as in `lookup_features`; features of other tables are not looked at.
        scores: with the policy ``"custom"``, and only then, one integer from 0 to 2**64 - 1 per id; the largest one
            of a key is its score. For a collection a dict by feature.
        epoch: with the policies ``"epoch_lru"`` and ``"epoch_lfu"``, and only then, the present epoch, an integer
            scalar from 0 to 2**31 - 1.
        method: as in `tt.embed_bag`.
        bounds: what is done about malformed offsets of `Bags`, as in `lookup_bags`: by default they are repaired, with
            a warning; with ``"error"``, where none can be raised, nothing is inserted or counted. All keys are in
            range. For a collection for all tables or by table.
        return_evicted: whether to return the rows that were evicted and their optimizer state, which costs reading
            them, and of a sharded table a sum over the devices, all of which get them.

    Returns:
        `Inserted`, for a collection by hash table, and the state.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.hash_table(1024, 8, optimizer=jax_tt.optimizers.Adagrad(0.1))
    >>> state = table.init(jax.random.key(0))
    >>> inserted, state = jax_tt.dynamic.insert(table, state, np.array([7, 7, -1]))
    >>> {name: int(count) for name, count in inserted.counts.items() if count}
    {'requests': 3, 'unique': 2, 'inserted': 2}
    """
    whole = checked_hash_table(table, state)
    requests, refused = key_requests(whole, ids, scores, treatment_of_keys(table, bounds, method))
    asked = InsertRequest(table, state, [requests], epoch, refused=refused)
    (result,) = insert_anywhere([asked], method, return_evicted)
    return result


def insert_anywhere(
    asked: Sequence[InsertRequest], method: str, return_evicted: bool
) -> list[tuple[Inserted, dict[str, Any]]]:
    """`dynamic.insert` of several tables, some of which may be sharded."""
    with own_constants():
        asked = [_without_keys_if_refused(one) for one in asked]
        sharded = [k for k, one in enumerate(asked) if is_sharded(one.table)]
        alone = [k for k in range(len(asked)) if k not in sharded]
        with jax.named_scope(scope_of(asked[k].table for k in alone)):
            done = _insert_on_every_device([asked[k] for k in alone], method, return_evicted)
        results = dict(zip(alone, done, strict=True))
        if sharded:
            with jax.named_scope(scope_of(asked[k].table for k in sharded)):
                done = insert_over_devices([asked[k] for k in sharded], method, return_evicted)
            results.update(zip(sharded, done, strict=True))
        return [_counted_unless_refused(one, *results[k]) for k, one in enumerate(asked)]


def _without_keys_if_refused(one: InsertRequest) -> InsertRequest:
    if one.refused is None:
        return one
    refused = refusals(one.refused, one.state[CLOCK], one.axis_name) > 0
    parts = [part._replace(here=part.here & ~refused) for part in one.parts]
    return one._replace(parts=parts, refused=refused)


def _counted_unless_refused(
    one: InsertRequest, done: Inserted, after: dict[str, Any]
) -> tuple[Inserted, dict[str, Any]]:
    """The results, in which a refused batch is none that the clock counts."""
    if one.refused is None:
        return done, after
    clock = after[CLOCK]
    return done, {**after, CLOCK: clock - one.refused.astype(clock.dtype)}


def _insert_on_every_device(
    asked: Sequence[InsertRequest], method: str, return_evicted: bool
) -> list[tuple[Inserted, dict[str, Any]]]:
    """Inserts into tables that every device holds; inside a ``shard_map`` the keys of all, so that they stay equal."""
    axes = [axes_to_count(one.state[KEYS[0]], list(one.parts), one.axis_name) for one in asked]
    asked = [
        one._replace(state={**one.state, CLOCK: clock_of_whole(one.table, one.state)})
        for one in asked
    ]
    gathered = [_of_all(*pair) if pair[1] else pair[0] for pair in zip(asked, axes, strict=True)]
    results = []
    if asked:
        results = insert_together(with_clock_counted_on(gathered, method), method, return_evicted)
    for k, (done, state) in enumerate(results):
        if axes[k]:
            size = sum(part.here.size for part in asked[k].parts)
            found = Slots(own_shard(done.found.numbers, size, axes[k]))
            results[k] = done._replace(found=found), state
    return results


def _of_all(asked: InsertRequest, axes: Any) -> InsertRequest:
    keys, here, given, _ = joined(asked.parts)
    keys, here, given = (all_shards(x, axes) for x in (keys, here.astype(jnp.int32), given))
    return asked._replace(parts=[KeyRequests(keys, here > 0, given)])


def with_slots(ids: Any, inserted: Any) -> Any:
    """The ids of a batch with the slots that their insertion found, for lookups that need not search them again.

    A lookup takes a slot if it still holds the key, and searches the key otherwise: after a growth, a removal or a
    later insertion, no key reads the row of another one. A key that the insertion gave no slot is missing in the
    lookup, which does not report it again. A training call of a layer does not insert these ids again.

    Args:
        ids: what `dynamic.insert` was called with.
        inserted: what it returned: `Inserted`, or a dict of them by table.

    Returns:
        The same ids as a kind of `SplitIds` with three words, the two of the key and the slot; in `Bags`, if they were
        in `Bags`. Of the batch of a collection a dict by feature; features of tables without keys are unchanged. The
        devices of a sharded table search all keys nevertheless.

    >>> import jax, jax_tt, numpy as np
    >>> table, keys = jax_tt.hash_table(1024, 8), np.array([7, -1])
    >>> inserted, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), keys)
    >>> located = jax_tt.dynamic.with_slots(keys, inserted)
    >>> rows, _ = jax_tt.lookup(table, state, located)
    >>> located.digits.shape, rows.shape
    ((2, 3), (2, 8))
    """
    return located(ids, inserted, current=False)


def located(ids: Any, inserted: Any, *, current: bool) -> Any:
    """`with_slots`; ``current`` says that the lookups are in the table as the insertion has left it."""
    if isinstance(inserted, Inserted):
        return _located("ids", ids, inserted.found, current)
    if not isinstance(inserted, Mapping) or isinstance(ids, Bags):
        got = f"{type_of(inserted)} for {type_of(ids)}"
        expected = "Inserted, or the dict that dynamic.insert returned beside its batch"
        raise mismatch("inserted", got, expected, error=TypeError)
    batch = {name: ids[name] for name in ids}
    for one in inserted.values():
        for name, slots in one.found.items():
            batch[name] = _located(f"ids[{name!r}]", batch[name], slots, current)
    return batch


def _located(name: str, ids: Any, slots: Any, current: bool) -> Any:
    if isinstance(ids, Bags):
        return dataclasses.replace(ids, ids=_with(name, ids.ids, ids.padded, slots, current))
    return _with(name, ids, False, slots, current)


def _with(name: str, ids: Any, padded: bool, slots: Any, current: bool) -> LocatedKeys:
    with own_constants():
        digits = jnp.asarray(key_digits(name, ids, padded).digits)
        shape = digits.shape[:-1]
        if slots is None:
            slots, current = Slots(jnp.zeros(math.prod(shape), jnp.int32)), False
        if getattr(slots, "shape", None) != (math.prod(shape),):
            got = f"ids of shape {shape} for the insertion of another batch"
            raise mismatch(name, got, "the ids that were inserted")
        numbers = reshape_like(slots.numbers, digits[..., :1])
        return LocatedKeys(jnp.concatenate([digits[..., 1:3], numbers], axis=-1), current)
