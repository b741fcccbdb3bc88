"""`host_batch`: prepares the output of data loaders for compiled steps, on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import as_int, instance_of, mismatch, one_of
from jax_tt._base.keywords import expect_names
from jax_tt._collection.feature import Feature, values_of
from jax_tt._collection.host_forms import GivenIds, read
from jax_tt._collection.host_ids import Bounds, table_ids
from jax_tt._collection.host_shares import (
    lengths_of,
    of_processes,
    offsets_of,
    rows_over,
)
from jax_tt._ids import keyed_checks
from jax_tt._ids.bags import Bags
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.keys import join_keys, refuse_cut_keys
from jax_tt._ids.split_ids import SplitIds
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._table.options import BOUNDS, DEFAULT_BOUNDS
from jax_tt._table.table import Table

_ALL = ""  # in place of a feature: `KeyedBags` as a whole


def host_batch(
    table: Table,
    ids: Any,
    *,
    pooled: bool = True,
    bounds: str = DEFAULT_BOUNDS,
    capacity: int | None = None,
    sharding: Any = None,
    local: bool = False,
) -> Any:
    """Prepares the ids of one table, as a data loader gives them, for a compiled step.

    Call it on the host, for every batch that enters ``jit``: without ``jax_enable_x64`` JAX cuts 64-bit integers to 32
    bits there, so that the id ``2**32 + 5`` would train row 5. `Collection.host_batch` does the same for all features
    of a collection, and the method ``host_batch`` of the layers for their table.

    Args:
        table: the table that the ids are looked up in.
        ids: an array of integers (numpy of any type, a torch tensor, or a JAX array, whose ids JAX may have cut),
            nested lists, `Bags`, `SplitIds` or a dict with the entry ``"ids"`` and, as needed, ``"lengths"`` ``[B]`` or
            ``"offsets"`` ``[B + 1]`` of flat ids ``[n]``, ``"weights"`` of the shape of the ids, and ``"pad_id"``, the
            id that marks padding in a rectangle ``[B, L]``. Nested lists are bags, also if they have the same length.
            Strings and bytes are hashed with `hash_ids` if the table is a `HashTable`.
        pooled: whether the batch is for `lookup_bags`; an array ``[B]`` is then one bag per id. With False, for
            `lookup`, the ids are integers of any shape.
        bounds: the treatment of ids out of range. ``"error"`` raises. The others keep them out of range, for a lookup
            with the same ``bounds``; ``"warn"`` warns here, once per table, and the lookup counts them.
        capacity: positions of ragged bags; by default the next power of two, of at least the number of bags, so that
            few programs are compiled.
        sharding: where the arrays go, e.g. ``NamedSharding(mesh, P("data"))``; by default the mesh of a `ShardedTable`,
            all axes of it, and the host for other tables. Ragged bags, and arrays whose first axis the devices do not
            divide, are replicated.
        local: in a program of several processes, whether the ids are the share of this one, as a loader gives that is
            sharded by process, and not the whole batch. All processes then make the call at the same time, in the
            thread that runs the steps, and each gets the batch of all shares, ragged ones too, in the order of the rows
            on the mesh. Shares may have different numbers of samples. Without it, every process is given the same
            batch; the first call, and every hundredth, compares them.

    Returns:
        An array or `SplitIds`, or `Bags` of them, always of the same types for a table: int32 ids, or `SplitIds` for a
        `HashTable` and for tensor trains of 2**31 rows or more.

    Raises:
        ImportError: strings without xxhash.
        RuntimeError: another process has failed.
        TypeError, ValueError: the ids do not fit, or are out of range with ``bounds="error"``; the message names the
            table, the first such id and its position. Or processes have different batches without ``local``, or shares
            of different forms.

    >>> import jax_tt, numpy as np
    >>> table = jax_tt.dense_table(1000, 16, name="item")
    >>> bags = jax_tt.pipeline.host_batch(table, [[3, 1, 999], [], [5, 7]])
    >>> bags.ids, bags.offsets
    (array([  3,   1, 999,   5,   7,   0,   0,   0], dtype=int32), array([0, 3, 3, 5], dtype=int32))
    >>> jax_tt.pipeline.host_batch(table, np.array([[2**32 + 5]]), bounds="error")
    Traceback (most recent call last):
    ...
    ValueError: item: ids: got id 4294967301 at position 0; expected 0 to 999. ...
    """
    fix = "Collections and layers have a method host_batch."
    instance_of("table", table, Table, "a jax_tt.Table", fix)
    one_of("bounds", bounds, BOUNDS)

    def given() -> dict[str, GivenIds]:
        given = read(table, ids, pooled)
        if not pooled and (given.offsets is not None or given.padding is not None):
            got = "bags for pooled=False"
            raise mismatch(f"{table.ids.label}ids", got, "integers of any shape, one row for each")
        _check(table, given, pooled, capacity)
        return {"": _converted(table, given, Bounds(bounds, table.name))}

    def assembled(given: Mapping[str, GivenIds]) -> Any:
        return _assembled(table, given[""], capacity)

    sharding = _sharding([table], sharding)
    labels, about = [table.ids.label], (pooled, capacity)
    return _placed(of_processes(given, assembled, labels, about, sharding, local), sharding)


def host_features(
    features: Mapping[str, Feature],
    tables: Mapping[str, Table],
    bounds: Mapping[str, Bounds],
    batch: Any,
    capacity: Any,
    sharding: Any,
    local: bool,
) -> Any:
    """`Collection.host_batch`, given the tables by feature, named for errors, and the bounds by table."""
    for treatment in bounds.values():
        one_of("bounds", treatment.mode, BOUNDS)
    sharding = _sharding(tables.values(), sharding)
    keys = batch.keys if isinstance(batch, KeyedBags) else None

    def given() -> dict[str, GivenIds]:
        if keys is not None and any(table.ids.takes_keys for table in tables.values()):
            refuse_cut_keys("batch.ids", batch.ids)
        host = _on_host(batch)
        values, capacities = values_of(features, host), _capacities(features, capacity)
        found = {}
        for name, feature in features.items():
            table, pooled = tables[name], feature.combiner is not None
            one = read(table, values[name], pooled)
            by_name = capacities.get(name) if isinstance(capacity, Mapping) else None
            _check(table, one, pooled, by_name)
            found[name] = _converted(table, one, bounds[feature.table])
        positions = host.ids.shape[0] if keys is not None else None
        return found | {_ALL: GivenIds(np.zeros(0, np.int32), capacity=positions)}

    def assembled(given: Mapping[str, GivenIds]) -> Any:
        types = {getattr(given[name].ids, "dtype", None) for name in features}
        if keys is not None and len(types) == 1 and None not in types:  # not `SplitIds`
            return _keyed(keys, given, capacity)
        capacities = _capacities(features, capacity)
        return {
            name: _assembled(table, given[name], capacities.get(name))
            for name, table in tables.items()
        }

    labels = [*(table.ids.label for table in tables.values()), ""]
    about = keys, capacity
    return _placed(of_processes(given, assembled, labels, about, sharding, local), sharding)


def _converted(table: Table, given: GivenIds, bounds: Bounds) -> GivenIds:
    """The ids in the type that the table takes."""
    return given._replace(ids=table_ids(table, given, bounds))


def _assembled(table: Table, given: GivenIds, capacity: Any) -> Any:
    """The input of a lookup of one feature, on the host."""
    ids, offsets, weights, padding, _ = given
    if offsets is not None:
        size = _capacity(f"{table.ids.label}capacity", given, capacity)
        return Bags(_padded(ids, size), offsets, _padded(weights, size))
    if weights is None and padding is None:
        return ids
    return Bags(ids, None, weights, padding is not None)


def _capacities(features: Mapping[str, Feature], capacity: Any) -> dict[str, Any]:
    """The capacity of every feature that one was given for."""
    if capacity is None:
        return {}
    if not isinstance(capacity, Mapping):
        return dict.fromkeys(features, as_int("capacity", capacity))
    expect_names("capacity", "feature", capacity, features)
    return dict(capacity)


def _capacity(name: str, given: GivenIds, capacity: Any) -> int:
    used = given.ids.shape[0]
    if capacity is None:
        # At least one position per bag: the powers below differ from batch to batch in features with few ids.
        bags = 0 if given.offsets is None else len(given.offsets) - 1
        return 1 << max((given.capacity or max(used, bags)) - 1, 0).bit_length()
    capacity = as_int(name, capacity)
    if not used <= capacity < 2**31:
        raise mismatch(name, f"{capacity} for {used} ids", f"at least {used} and fewer than 2**31")
    return capacity


def _padded(array: Any, capacity: int) -> Any:
    if array is None:
        return None
    if isinstance(array, SplitIds):
        return SplitIds(_padded(array.digits, capacity))
    longer = np.zeros((capacity, *array.shape[1:]), array.dtype)
    longer[: array.shape[0]] = array
    return longer


def _keyed(keys: tuple[str, ...], given: Mapping[str, GivenIds], capacity: Any) -> KeyedBags:
    """The bags of all features in this order."""
    if isinstance(capacity, Mapping):
        raise ValueError("capacity: got a mapping for KeyedBags; expected one number for all.")
    parts = [given[name] for name in keys]
    ids = np.concatenate([part.ids for part in parts])
    size = _capacity("capacity", given[_ALL]._replace(ids=ids), capacity)
    lengths = [lengths_of(part) for part in parts]
    weights = None
    if kinds := [part.weights.dtype for part in parts if part.weights is not None]:
        ones = (np.ones(len(part.ids), kinds[0]) for part in parts)
        every = [w if p.weights is None else p.weights for w, p in zip(ones, parts, strict=True)]
        weights = _padded(np.concatenate(every), size)
    bags = Bags(_padded(ids, size), offsets_of(np.concatenate(lengths)), weights)
    plain = tuple(name for name in keys if kinds and given[name].weights is None)
    keyed = KeyedBags.of(bags, keys, tuple(map(len, lengths)))
    return dataclasses.replace(keyed, unweighted=plain)


def _on_host(batch: Any) -> Any:
    """`KeyedBags` with numpy arrays, whose offsets are checked; other batches unchanged."""
    if not isinstance(batch, KeyedBags):
        return batch
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)):
        raise TypeError("batch: got traced KeyedBags; host_batch runs on the host, before jit.")
    host = jax.tree.map(np.asarray, batch.checked())
    count = host.capacity
    keyed_checks.check_offsets("batch.offsets", host.keys, host.sizes, host.offsets, count, count)
    places = np.zeros(host.ids.shape, np.int32)
    bags = Bags.from_offsets(places, host.offsets, host.weights, capacity=len(places))
    # Negative ids of tables without keys are out of range, and stay so.
    ids = join_keys(host.ids).view(np.int64) if isinstance(host.ids, SplitIds) else host.ids
    return dataclasses.replace(host, ids=ids, offsets=bags.offsets, weights=bags.weights)


def _check(table: Table, given: GivenIds, pooled: bool, capacity: Any) -> None:
    """Raises for weights of rows that are not pooled, and for a capacity of rectangles."""
    if capacity is not None and given.offsets is None:
        got = f"{capacity!r} for ids of shape {tuple(given.ids.shape)}"
        raise mismatch(f"{table.ids.label}capacity", got, "None, or ragged bags")
    if given.weights is not None and not pooled:
        fix = "Multiply the rows by them, or give the feature a combiner."
        got = "some for rows that are not combined"
        raise mismatch(f"{table.ids.label}weights", got, "None", fix)


def _sharding(tables: Any, sharding: Any) -> Any:
    """The sharding that was given, or that of a batch on the mesh of the tables."""
    if sharding is not None:
        return sharding
    for table in tables:
        if isinstance(table, ShardedTable):
            return NamedSharding(table.mesh, P(table.mesh.axis_names))
    return None


def _placed(batch: Any, sharding: Any) -> Any:
    """The batch on devices, in one transfer; on the host without a sharding."""
    if sharding is None:
        return batch
    if not isinstance(sharding, NamedSharding):
        return jax.device_put(batch, sharding)
    rows, devices = rows_over(sharding)
    replicated = NamedSharding(sharding.mesh, P())

    def place(value: Any) -> Any:
        ragged = isinstance(value, KeyedBags) or (
            isinstance(value, Bags) and value.offsets is not None
        )
        return jax.tree.map(
            lambda leaf: rows if not ragged and divides(leaf) else replicated, value
        )

    def divides(leaf: Any) -> bool:
        return leaf.ndim > 0 and leaf.shape[0] % devices == 0

    by_feature = isinstance(batch, dict)
    places = {f: place(value) for f, value in batch.items()} if by_feature else place(batch)
    if replicated.is_fully_addressable:
        return jax.device_put(batch, places)
    # Every process has the whole batch, and gives the parts of its devices.
    return jax.tree.map(
        lambda leaf, place: jax.make_array_from_callback(leaf.shape, place, leaf.__getitem__),
        batch,
        places,
    )
