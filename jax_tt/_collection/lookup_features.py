"""`lookup_features`: all features of a collection in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from jax_tt._base.arguments import mismatch, one_of, type_of
from jax_tt._base.dtypes import accumulator
from jax_tt._base.keywords import expect_names
from jax_tt._collection.collection import Collection, States
from jax_tt._collection.flat_bags import count_out_of_range, flat_bags, side_by_side
from jax_tt._collection.insertion import insert_in_collection_call
from jax_tt._collection.joined import joined, separated
from jax_tt._collection.requests import Request, requests_of
from jax_tt._collection.states import UPDATES, check_statistics
from jax_tt._collection.statistics import (
    STATISTICS,
    TOTALS,
    CountedBatch,
    check_countable,
    count_batches,
)
from jax_tt._collection.wide import WIDE, check_wide, wide_of
from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import explicit_mesh
from jax_tt._ids.id_space import plus_count
from jax_tt._ids.inputs import bag_batch
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.offsets import well_formed, without_ids_if
from jax_tt._jax.on_host import own_constants
from jax_tt._kinds.hashed.table import found_slots, require_hash_table
from jax_tt._lookup.limit import limit_of_sums, rearranged
from jax_tt._lookup.offsets import nan_if
from jax_tt._lookup.pooled_sums import OUT_OF_RANGE, choose_execution, pooled_sums, prepare_call
from jax_tt._ops.lookup import options_of
from jax_tt._table.check import check_state
from jax_tt._table.groups import BoundTable
from jax_tt._table.options import Lookup, StepInputs
from jax_tt._table.parts_of_arrays import detached, taken
from jax_tt._table.row_shard import RowShard, row_shard

LAYOUTS = ("features", *WIDE)
BATCH_ARRAYS = ("ids", "offsets", "weights")


def lookup_features(
    collection: Collection,
    state: States,
    batch: Any,
    options: Lookup | None = None,
    inputs: StepInputs | None = None,
    *,
    layout: str = "features",
    **named: Any,
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Rows and pooled rows of all features of a collection.

    Features that share a table are looked up as one batch of it, so that a table with an optimizer is used once, and
    duplicate ids across its features are summed before the one update.

    Args:
        collection: the tables and features.
        state: arrays by table and name, as `Collection.init` returns them.
        batch: all features, either a dict or `KeyedBags`. The value of a feature is `Bags` or ids ``[B, L]``, or, for a
            sequence, integers of any shape or `Bags`; `SplitIds` where the table takes them.
        options: a `Lookup` for all tables, or its fields as keywords as in `lookup`. Its combiner must be the default:
            features have their own.
        inputs: of the updates, as `extension.StepInputs` or its fields as keywords. ``hyperparameters`` are by table
            and name, ``{"item": {"learning_rate": rate}}``.
            ``grad_scale`` divides the gradients of tables with an optimizer; those of the others are as JAX gives them.
        layout: ``"features"`` for a dict; ``"concatenated"`` for one array of all columns, in the order of the
            features; ``"stacked"`` for one array with an axis of features, which must have the same width. In the last
            two, every feature has one vector per sample, and the array has the widest type of the features.

    Returns:
        By feature, ``[B, D]``, or ``[*ids.shape, D]`` for a sequence (``[capacity, D]`` for one of ragged bags, with
        zeros for positions without an id); or ``[B, total D]`` or ``[B, F, D]``. And the state after the call, which
        differs from ``state`` only in counts, such as those of a row cache or of `Collection.with_statistics`.

        Differentiable in ``state`` and in weights; the cotangents of the arrays of a table with an optimizer are their
        new values, see `Collection.overwritten`.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> collection = jax_tt.Collection(
    ...     {"item": jax_tt.tt_table(1000, 16, tt_ranks=4), "ad": jax_tt.dense_table(50, 8)},
    ...     {"clicked": jax_tt.Feature("item", combiner="mean"), "carted": jax_tt.Feature("item"),
    ...      "shown": jax_tt.Feature("ad", combiner=None)},
    ... )
    >>> state = collection.init(jax.random.key(0))
    >>> batch = {
    ...     "clicked": jax_tt.Bags.from_ragged([[3, 1], [999]]),
    ...     "carted": jnp.array([[1], [2]]),
    ...     "shown": jnp.array([[4, 5, 6], [7, 8, 9]]),
    ... }
    >>> rows, state = jax_tt.lookup_features(collection, state, batch)
    >>> jax.tree.map(jnp.shape, rows)
    {'carted': (2, 16), 'clicked': (2, 16), 'shown': (2, 3, 8)}
    """
    lookup, inputs = options_of("lookup_features", options, inputs, named)
    check_lookup(lookup)
    one_of("layout", layout, LAYOUTS)
    arguments = step_arguments(collection, inputs.grad_scale, inputs.hyperparameters)
    by_table = {
        name: StepInputs(scale, inputs.key, own) for name, (scale, own) in arguments.items()
    }
    lookups = dict.fromkeys(collection.tables, lookup)
    rows = collection.rows_by_table(state)
    beside = {name: own for name, own in state.items() if name in (UPDATES, STATISTICS)}
    if not lookup.train:
        beside.pop(STATISTICS, None)
    with own_constants():
        result, after = embed(collection, rows | beside, batch, lookups, by_table, layout)
    # Calls change nothing in stacks, nor what tables share.
    kept = {*collection.stacks, UPDATES}
    return result, {
        name: dict(own) if name in kept else after.get(name, dict(own))
        for name, own in state.items()
    }


def embed(
    collection: Collection,
    state: States,
    batch: Any,
    lookups: Mapping[str, Lookup],
    inputs: Mapping[str, StepInputs],
    layout: str,
    insert: bool = False,
) -> tuple[Any, dict[str, dict[str, Any]]]:
    """`lookup_features` with options and inputs by table, after an insertion of keys if a layer asks for it.

    ``state`` has the arrays of every table, as `Collection.rows_by_table` returns them, and what tables share. The
    statistics are counted if it has them.
    """
    if STATISTICS in state:
        check_statistics("state", state, collection.tables)
    lookups = {name: lookup.replace(caller="lookup_features") for name, lookup in lookups.items()}
    shards: dict[str, RowShard | None] = dict.fromkeys(collection.tables)
    if get_abstract_mesh().manual_axes:
        shards = {name: row_shard(table, state[name]) for name, table in collection.tables.items()}
    for name, table in collection.tables.items():
        shard = shards[name]
        check_state(shard.table if shard else table, state[name])
    storages = {name: table.spec.storage(state[name]) for name, table in collection.tables.items()}
    tables = collection.for_batches
    uses = {
        name: choose_execution(table, state[name], lookups[name], shards[name])
        for name, table in tables.items()
    }
    batch, requests, refused = requests_of(collection, batch, storages, uses, lookups)
    in_place = _in_place(collection, uses, state, requests)
    given, apart = state, {n: taken(state[n]) for n in collection.stack_of if n not in in_place}
    state = {**state, **apart}
    if insert and collection.hashed:
        batch, state = insert_in_collection_call(collection, state, batch, lookups, refused)
        batch, requests, _ = requests_of(collection, batch, storages, uses, lookups)
    if layout in WIDE:
        counts = {name: request.samples for name, request in requests.items()}
        check_wide(collection, layout, counts)
    shared = collection.shared(state)
    scalars: list[dict[str, Any]] = [{}] * len(tables)
    if shared is not None:
        scalars = jax.lax.stop_gradient(shared).states(list(tables.values()))
    calls, counted, after = [], {}, {}
    batches = {
        name: _batch_of(use, storages[name], {f: requests[f] for f in features}, batch)
        for (name, use), features in zip(uses.items(), collection.features_of.values(), strict=True)
    }
    if refused is not None:
        batches = {name: without_ids_if(refused, one) for name, one in batches.items()}
    if any(table.ids.takes_keys for table in tables.values()):
        batches |= _found_keys(uses, state, batches)
    flats = {}
    if isinstance(batch, KeyedBags) and in_place and explicit_mesh((state, batches)) is None:
        found = flat_bags(collection, batch, requests, storages, refused)
        flats = {name: found[name] for name in found if name in in_place}
    counting = {name: tables[name].num_embeddings for name in flats if OUT_OF_RANGE in state[name]}
    counts = count_out_of_range(flats, counting) if counting else {}
    for (name, table), read in zip(tables.items(), scalars, strict=True):
        ids = batches[name]
        own = {
            array: x
            for array, x in state[name].items()
            if name not in counts or array != OUT_OF_RANGE
        }
        call, changed = prepare_call(uses[name], {**own, **read}, ids, inputs[name], refused)
        if name in counts:
            changed = {**changed, OUT_OF_RANGE: plus_count(state[name][OUT_OF_RANGE], counts[name])}
        if call.limit is not None:
            of_table = [requests[feature] for feature in collection.features_of[name]]
            call = call._replace(limit=_limit_of_sums(call.limit, call.batch, uses[name], of_table))
        # Where preparation has changed the batch, it is no part of the others any more.
        same = all(getattr(call.batch, k) is getattr(ids, k) for k in BATCH_ARRAYS)
        flat = flats.get(name) if same else None
        if flat or (name in in_place and name in collection.stack_of):
            bound = dataclasses.replace(call.use, has_parts=True)
            call = call._replace(use=bound, flat=flat)
        calls.append(call)
        counted[name] = CountedBatch(table, call.use.lookup, ids, call.batch)
        changed = {array: value for array, value in changed.items() if array not in read}
        after[name] = {**state[name], **changed}
        # Rows that were taken out of a stack and not changed are still those of the stack.
        own = apart.get(name, {})
        after[name] |= {k: given[name][k] for k, x in own.items() if after[name][k] is x}
    if STATISTICS in state:
        check_countable(tables)
        after[STATISTICS] = {TOTALS: count_batches(state[STATISTICS][TOTALS], counted)}
    calls, together = detached(calls) if any(x.use.has_parts for x in calls) else (calls, {})
    dtypes = {name: jnp.dtype(lookups[name].dtype or storages[name]) for name in tables}
    alike = len({(accumulator(storages[name]), dtypes[name]) for name in tables}) == 1
    undivided = explicit_mesh((calls, together)) is None and all(
        use.execution.devices <= 1 for use in uses.values()
    )
    at_once = layout in WIDE and alike and undivided
    if at_once and (wide := wide_of(collection, requests)):
        array = pooled_sums(calls, wide, shared, together).astype(next(iter(dtypes.values())))
        array = array if refused is None else nan_if(refused, array)
        return WIDE[layout].of_wide(array, len(requests)), after
    sums = dict(zip(tables, pooled_sums(calls, None, shared, together), strict=True))
    rows: dict[str, jax.Array] = {}
    for name, features in collection.features_of.items():
        of_features = [requests[feature] for feature in features]
        parts = [sums[name]]
        if len(features) > 1:
            parts = separated(uses[name], sums[name], [request.summed for request in of_features])
        for feature, request, part in zip(features, of_features, parts, strict=True):
            rows[feature] = request.result(part, dtypes[name])
    rows = {name: rows[name] for name in collection.features}
    if refused is not None:
        rows = {name: nan_if(refused, array) for name, array in rows.items()}
    return WIDE[layout].of_rows(rows) if layout in WIDE else rows, after


def _in_place(
    collection: Collection,
    uses: Mapping[str, BoundTable],
    state: States,
    requests: Mapping[str, Request],
) -> set[str]:
    """The tables whose native ops may take parts of shared arrays where they are, all or none of a stack."""
    if get_abstract_mesh().manual_axes:
        return set()
    able = {
        name
        for name, use in uses.items()
        if not use.execution.devices
        and use.lookup.axis_name is None
        and use.execution.group is not None
    }
    apart = [
        stack.tables for stack in collection.stacks.values() if not able.issuperset(stack.tables)
    ]
    for stack in collection.stacks.values():
        methods = {uses[name].lookup.method for name in stack.tables}
        features = [f for name in stack.tables for f in collection.features_of[name]]
        batches = [requests[feature].batch for feature in features]
        # Keys are inserted into all tables of a stack by one call, which no explicit axis divides.
        if stack.takes_keys and (len(methods) > 1 or explicit_mesh((state, batches)) is not None):
            apart.append(stack.tables)
    return able.difference(*apart)


def _found_keys(
    uses: Mapping[str, BoundTable], state: States, batches: Mapping[str, Batch]
) -> dict[str, Batch]:
    """The batches of hash tables with the slots of their keys, which are searched together."""
    # Devices that hold parts of a table find its keys in the exchange.
    hashed = {
        name: use
        for name, use in uses.items()
        if use.table.ids.takes_keys and not use.execution.devices
    }
    found = found_slots(
        [
            (require_hash_table(use.table), state[name], batches[name], use.lookup)
            for name, use in hashed.items()
        ]
    )
    return dict(zip(hashed, found, strict=True))


def _limit_of_sums(
    limit: jax.Array, batch: Batch, use: BoundTable, requests: Sequence[Request]
) -> jax.Array:
    """The limit for the sums of the batch of all features of a table, as `Call.limit`."""
    limits = [
        limit
        if request.lookup is None
        else limit_of_sums(limit, request.lookup, request.table, request.batch)
        for request in requests
    ]
    if len(limits) == 1 or not any(one.ndim for one in limits):
        return limits[0]
    summed = [request.summed for request in requests]
    of_bags = tuple(
        jnp.broadcast_to(one, (part.num_segments, part.num_bags, 1))
        for one, part in zip(limits, summed, strict=True)
    )
    shape = batch.num_segments, batch.num_bags, 1
    return rearranged(lambda sums: tuple(separated(use, sums, summed)), shape, of_bags)


def _batch_of(use: BoundTable, storage: Any, requests: Mapping[str, Request], batch: Any) -> Batch:
    """The one batch of a table."""
    pooled = (request.lookup is not None for request in requests.values())
    alike = all(pooled) and all(request.summed is request.batch for request in requests.values())
    if isinstance(batch, KeyedBags) and alike and side_by_side(batch, tuple(requests)):
        # Neighbours in the flat arrays are one batch already.
        first = batch.keys.index(next(iter(requests)))
        whole = batch.between(first, first + len(requests))
        return well_formed(bag_batch(use.table.ids, whole, accumulator(storage))[0])
    batches = {name: request.summed for name, request in requests.items()}
    return joined(use, batches) if len(batches) > 1 else next(iter(batches.values()))


def check_lookup(
    lookup: Lookup,
    own: str = "every feature has its own, e.g. jax_tt.Feature('item', combiner={!r})",
) -> None:
    """Raises for options with a combiner, which is given elsewhere, as ``own`` says."""
    if not isinstance(lookup, Lookup):
        raise TypeError(f"lookup: got {lookup!r}; expected a jax_tt.Lookup.")
    if lookup.combiner != "sum":
        raise ValueError(
            f"lookup: got combiner={lookup.combiner!r}; {own.format(lookup.combiner)}."
        )


def step_arguments(
    collection: Collection, grad_scale: Any, hyperparameters: Any
) -> dict[str, tuple[Any, Mapping[str, Any] | None]]:
    """The loss scale and the hyper-parameters of every table, by table and name, from the arguments of a call."""
    if not isinstance(collection, Collection):
        expected = "a description of tables and features, jax_tt.Collection(tables, features)"
        raise mismatch("collection", type_of(collection), expected, error=TypeError)
    if hyperparameters is not None:
        _check(collection, hyperparameters)
    given = hyperparameters or {}
    if grad_scale is not None and all(table.update is None for table in collection.tables.values()):
        fix = "Divide its gradients by the scale after jax.grad, or describe tables with an optimizer."
        raise mismatch("grad_scale", "one for a collection without optimizers", "None", fix)
    return {
        name: (None, None) if table.update is None else (grad_scale, given.get(name))
        for name, table in collection.tables.items()
    }


def _check(collection: Collection, given: Any) -> None:
    if not isinstance(given, Mapping) or not all(
        isinstance(own, Mapping) for own in given.values()
    ):
        expected = "a mapping from tables to mappings from names to scalars, e.g. {'item': {'learning_rate': 0.01}}"
        raise mismatch("hyperparameters", repr(given), expected, error=TypeError)
    expect_names("hyperparameters", "table", given, collection.tables)
    for name in given:
        if collection.tables[name].update is None:
            fix = "Give them to the optax transformation, or describe the table with an optimizer."
            got = "some for a table without an optimizer, which optax steps"
            raise mismatch(f"hyperparameters[{name!r}]", got, "none", fix)
