"""`HashTable`: a table of which any 64-bit key may have a row."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base.arguments import as_int, mismatch, one_of, type_of
from jax_tt._directories.admission import Admission, AdmitAfter, as_admission
from jax_tt._directories.batch_clock import KEPT
from jax_tt._directories.hash_directory import (
    CLOCK,
    COUNTERS,
    KEYS,
    MAX_WAYS,
    POLICIES,
    SAFE_CHECKS,
    SEED,
    SILENT,
    TOTALS,
    WAITING,
    Check,
    Eviction,
    directory_of,
    init_directory,
)
from jax_tt._directories.initial import InitialRows, Normal
from jax_tt._directories.relocate import relocated
from jax_tt._ids.batch import Batch, present
from jax_tt._ids.explicit import like_segments, over_explicit_axes
from jax_tt._ids.id_space import IdSpace, outside
from jax_tt._ids.keys import keys_of, slots_of
from jax_tt._ids.split_ids import SplitIds
from jax_tt._lookup.best_rows import Queries, best_rows, in_order
from jax_tt._native import hash_backend
from jax_tt._native.hash import Fresh, Search
from jax_tt._native.partition import check_unsharded
from jax_tt._native.rows import RowTable
from jax_tt._table.added import added_rows, adds_rows
from jax_tt._table.check import check_state, check_table
from jax_tt._table.checkpoint import unsharded
from jax_tt._table.options import Lookup
from jax_tt._table.parts_of_arrays import StackRows
from jax_tt._table.state import Array, State, StateSpec
from jax_tt._table.table import Table
from jax_tt._table.whole import attend, to_dense
from jax_tt._table.wrapper import Wrapper, delegate, innermost

# The linen collection of these arrays.
COLLECTION = "hash_table"
_UNTRAINED = (
    "{count} ids of a training batch are keys without a row. They read their initial values and train nothing. Insert "
    "them first, jax_tt.dynamic.insert(table, state, ids), as training calls of layers do; where tables are full, "
    "raise the capacity. safe_check='ignore' gives no warning."
)
_MOVED_BY = "HashTable.of_rows takes the keys of another capacity, other ways or several devices."
MISSING = ("initial", "zeros")

Initializer = InitialRows | Callable[[jax.Array, int], jax.Array]


@dataclasses.dataclass(frozen=True)
class HashTable(Wrapper):
    """A table of 64-bit keys: each key in it has a slot, which is a row of the wrapped table.

    `dynamic.insert` gives new keys a slot, and so does a training call of a layer; other lookups only find keys, and
    never change the state. The positions of other keys read the initial values of these keys, which depend on the
    seed and the key alone; they have a gradient with respect to weights, but train nothing.

    Ids are keys: any integers of 64 bits, without exception, in int64, uint64, narrower types or, without
    ``jax_enable_x64``, `SplitIds` of `split_keys`. An int64 key and the uint64 key with the same bits are the same.

    The state is that of the wrapped table and ``hash_*``: the directory of keys, their scores and last batches, the
    number of batches so far, the seed, and totals.

    Attributes:
        table: a `DenseTable`, whose rows are reset when another key gets their slot; or a table whose rows share
            parameters, such as a `TTTable`, also with an order of ids, of which a slot is an id. Its number of rows is
            the capacity.
        policy: what the score of a key is, by which keys are evicted from full sets: ``"lru"``, the last batch that
            requested it; ``"lfu"``, its requests; ``"epoch_lru"`` and ``"epoch_lfu"``, these within epochs;
            ``"custom"``, scores that are given with the batch; or ``"none"``, nothing is evicted.
        ways: slots of a set, at most 64; a key may be in two sets.
        min_age: a key may be evicted if its last batch is at least so many batches ago, from 1 to 2^30.
        admission: which new keys are inserted: None for all, `AdmitAfter` (or its number of requests), or
            `AdmitWithProbability`.
        max_capacity: what `grow_if_full` never exceeds: the capacity times a power of 2, as it doubles; None for no
            growth.
        seed: of the initial values, an integer of 64 bits.
        initializer: `Normal`, `TruncatedNormal`, `Uniform` or `Constant`, or a function of keys uint32 ``[n, 2]`` (high
            and low words) and the number of columns that returns ``[n, D]``; None for ``Normal(1 / sqrt(D))``.
        missing: what keys that are not in the table read where ``Lookup.train`` is False, and in every lookup of a
            frozen table: their ``"initial"`` values, ``"zeros"``, or the row of this number.
        safe_check: what to do where a training lookup has missing keys, or an insertion finds no room for keys:
            ``"error"`` raises, ``"warn"`` issues a `MissingKeyWarning`, ``"ignore"`` does nothing. The first two take a
            host callback, and also warn of keys that are evicted where a table moves to other devices.
        frozen: whether no lookup is one of training, as in the tables of `Collection.frozen`.

    >>> import jax, jax_tt, numpy as np
    >>> table = jax_tt.tables.HashTable(jax_tt.tables.DenseTable(1024, 8), policy="lfu")
    >>> state, keys = table.init(jax.random.key(0)), np.array([-1, 2**62, 5])
    >>> inserted, state = jax_tt.dynamic.insert(table, state, keys)
    >>> rows, _ = jax_tt.lookup(table, state, keys)
    >>> rows.shape, int(inserted.counts["inserted"])
    ((3, 8), 3)
    """

    policy: str = "lru"
    ways: int = 8
    min_age: int = 1
    admission: Admission | int | None = None
    max_capacity: int | None = None
    seed: int = 0
    initializer: Initializer | None = None
    missing: str | int = "initial"
    safe_check: str = "warn"
    frozen: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_table(self.table)
        one_of("policy", self.policy, POLICIES)
        one_of("safe_check", self.safe_check, SAFE_CHECKS)
        as_int("min_age", self.min_age, 1, KEPT)
        _check_capacity(self.ids.label, self.num_embeddings, self.ways)
        object.__setattr__(self, "admission", as_admission(self.admission))
        as_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_capacity is not None:
            _check_most(self.num_embeddings, as_int("max_capacity", self.max_capacity))
        if self.initializer is None:
            scale = 1 / math.sqrt(self.features)
            object.__setattr__(self, "initializer", Normal(scale))
        elif not callable(self.initializer) and not isinstance(self.initializer, InitialRows):
            expected = (
                "None, one such as dynamic.Uniform(0.1), or a function (keys, features) -> rows"
            )
            raise mismatch("initializer", repr(self.initializer), expected, error=TypeError)
        _check_missing(self.missing, self.num_embeddings)

    @property
    def eviction(self) -> Eviction:
        return Eviction(self.policy, self.min_age)

    @property
    def counts_requests(self) -> bool:
        """Whether an insertion depends on how often a batch requests a key."""
        return self.eviction.counts_requests or isinstance(self.admission, AdmitAfter)

    @property
    def sets(self) -> int:
        return self.num_embeddings // self.ways

    @property
    def waiting_sets(self) -> int:
        """Sets of the directory of keys that wait for admission, or 0."""
        if not isinstance(self.admission, AdmitAfter):
            return 0
        waiting = self.admission.waiting or self.num_embeddings
        return -(-waiting // self.ways)

    @functools.cached_property
    def hash_shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and types of the arrays that the wrapped table does not have."""
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            CLOCK: ((), jnp.int32),
            SEED: ((2,), jnp.uint32),
            TOTALS: ((len(COUNTERS), 2), jnp.uint32),
        }
        sizes = {KEYS: self.sets} | ({WAITING: self.waiting_sets} if self.waiting_sets else {})
        for names, sets in sizes.items():
            like = jax.eval_shape(functools.partial(init_directory, sets, self.ways))
            shapes |= {name: (a.shape, a.dtype) for name, a in zip(names, like, strict=True)}
        return shapes

    @functools.cached_property
    def spec(self) -> StateSpec:
        arrays = (
            Array(name, "buffer", shape, jnp.dtype(dtype), collection=COLLECTION, hint=_MOVED_BY)
            for name, (shape, dtype) in self.hash_shapes.items()
        )
        return self.table.spec.without_rows().extended(*arrays)

    @functools.cached_property
    def ids(self) -> IdSpace:
        return dataclasses.replace(self.table.ids, takes_keys=True, takes_slots=False)

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        rest = {name: jnp.zeros(*like) for name, like in self.hash_shapes.items()}
        words = (self.seed >> 32) & 0xFFFFFFFF, self.seed & 0xFFFFFFFF
        return {**self.table.init_rest(params), **rest, SEED: jnp.array(words, jnp.uint32)}

    def of_rows(self, state: State) -> dict[str, Any]:
        """The state of the same keys in this table, from one of another capacity or of several devices.

        Keys that find no room are evicted, those with the lowest scores, and a `MissingKeyWarning` says how many. So
        are counts of keys that wait for admission forgotten.

        Args:
            state: arrays by name, such as `ShardedTable.by_row` or `Collection.separated` returns them. Where the
                slots are the same as in this table, they are returned as they are.

        Raises:
            ValueError: there is no room for all keys, and the policy is ``"none"``; the message has a capacity and
                ways that have.
            TypeError: the arrays are traced, and keys get other slots.

        >>> import jax, jax_tt, numpy as np
        >>> small, large = jax_tt.hash_table(64, 8), jax_tt.hash_table(96, 8)
        >>> _, state = jax_tt.dynamic.insert(small, small.init(jax.random.key(0)), np.arange(40))
        >>> jax_tt.dynamic.statistics(large, large.of_rows(state))["keys"]
        40
        """
        return relocated(self, state, 1)

    # Lookups

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        """Turns keys into slots, where that has not been done; missing keys get a number out of range."""
        (batch,) = found_slots([(self, state, batch, lookup)])
        return self.table.prepare(
            state, dataclasses.replace(batch, ids=batch.slots, slots=None), lookup
        )

    def search(self, state: State, batch: Batch, lookup: Lookup) -> Search:
        """The search of the keys of a batch."""
        search = self.search_of(state, keys_of(batch), present(batch).reshape(-1), lookup)
        slots = slots_of(batch)
        return search if slots is None else search._replace(guess=slots.reshape(-1))

    def search_of(self, state: State, keys: jax.Array, here: jax.Array, lookup: Lookup) -> Search:
        """The search of the keys uint32 ``[n, 2]`` that are ``here``."""
        check = Check(self.safe_check, self.untrained) if self.trains(lookup) else SILENT
        directory = jax.lax.stop_gradient(directory_of(state))
        return Search(directory, keys, here, absent=self.absent(lookup), check=check)

    @property
    def untrained(self) -> str:
        """What is said of keys without a row in a training batch."""
        return f"{self.ids.label}ids: {_UNTRAINED}"

    def trains(self, lookup: Lookup) -> bool:
        """Whether a lookup is one of training, in which keys without a row read their initial rows."""
        update = self.update
        return lookup.train and not (self.frozen or (update is not None and update.frozen))

    def absent(self, lookup: Lookup) -> int:
        """What is looked up in place of the slot of a key without one."""
        if self.trains(lookup) or isinstance(self.missing, str):
            return self.num_embeddings
        return self.missing

    def initial(
        self, state: State, keys: jax.Array, wanted: jax.Array, dtype: Any, method: str
    ) -> jax.Array:
        """Initial rows ``[n, D]`` of the keys uint32 ``[n, 2]`` that are ``wanted``; others are unspecified."""
        (rows,) = initial_of_tables([(self, state, keys, wanted, dtype)], [method])
        return rows


@adds_rows.register(HashTable)
def adds_missing_rows(table: HashTable, lookup: Lookup) -> bool:
    return table.trains(lookup) or table.missing == "initial"


@added_rows.register(HashTable)
def rows_of_missing_keys(
    table: HashTable, state: State, given: Batch, prepared: Batch, lookup: Lookup, storage: Any
) -> tuple[Table, State, Batch]:
    """The initial values of missing keys as a table with one row per position."""
    rows = prepared.ids.size

    def missing_rows(inputs: tuple[State, Batch, Batch]) -> tuple[jax.Array, jax.Array]:
        state, given, prepared = inputs
        missing = outside(table.table.ids, prepared)
        here = missing.reshape(-1)
        values = table.initial(state, keys_of(given), here, storage, lookup.method)
        numbers = jnp.arange(rows, dtype=jnp.int32).reshape(missing.shape)
        return values, jnp.where(missing, numbers, -1)

    inputs = {SEED: state[SEED]}, given, prepared
    values, ids = over_explicit_axes(
        missing_rows, inputs, lambda: (like_segments(prepared, 2),) * 2
    )
    batch = dataclasses.replace(prepared, ids=ids, slots=None, padded=False)
    # The size of a symbolic batch is not known here; all ids are rows of the array or negative.
    most = max(rows, 1) if isinstance(rows, int) else 2**31 - 1
    initial = RowTable(most, table.features, param_dtype=storage, name=table.name)
    if isinstance(rows, int) and rows == 0:
        values = jnp.zeros((1, table.features), storage)
    return initial, {"embedding": values}, batch


delegate(HashTable, to_dense, attend)


def initial_of_tables(
    asked: Sequence[tuple[HashTable, State, jax.Array, jax.Array, Any]], methods: Sequence[str]
) -> list[jax.Array]:
    """`HashTable.initial` of several tables."""
    rows: dict[int, jax.Array] = {}
    fresh: dict[int, Fresh] = {}
    for k, (table, state, keys, wanted, dtype) in enumerate(asked):
        values, features = table.initializer, table.features
        if isinstance(values, InitialRows):
            fresh[k] = Fresh(state[SEED], keys, wanted, values, features, dtype)
            continue
        assert values is not None
        given = jnp.asarray(values(keys, features))
        if given.shape != (keys.shape[0], features):
            expected = f"one row per key, {(keys.shape[0], features)}"
            raise mismatch(f"{table.ids.label}initializer", given, expected)
        rows[k] = given.astype(dtype)
    drawn = hash_backend.initial_many(list(fresh.values()), [methods[k] for k in fresh])
    rows.update(zip(fresh, drawn, strict=True))
    return [rows[k] for k in range(len(asked))]


def found_slots(lookups: Sequence[tuple[HashTable, State, Batch, Lookup]]) -> list[Batch]:
    """The batches with the slots of their keys; one search for all batches that came without slots."""
    batches = [
        _with_current_slots(table, batch, lookup) if batch.current else batch
        for table, _, batch, lookup in lookups
    ]
    new = [k for k, batch in enumerate(batches) if batch.slots is None]

    def find(inputs: Sequence[tuple[State, Batch]]) -> list[jax.Array]:
        searches, methods = [], []
        for (state, batch), k in zip(inputs, new, strict=True):
            table, _, _, lookup = lookups[k]
            searches.append(table.search(state, batch, lookup))
            methods.append(lookup.method)
        slots = hash_backend.find_many(searches, methods)
        return [x.reshape(batch.ids.shape[:2]) for x, (_, batch) in zip(slots, inputs, strict=True)]

    asked = [({name: lookups[k][1][name] for name in KEYS}, batches[k]) for k in new]
    slots = over_explicit_axes(find, asked, lambda: [like_segments(b, 2) for _, b in asked])
    for k, of_batch in zip(new, slots, strict=True):
        batches[k] = dataclasses.replace(batches[k], slots=of_batch)
    return batches


def _with_current_slots(table: HashTable, batch: Batch, lookup: Lookup) -> Batch:
    """The batch with the slots that it came with, which the table need not be searched for."""

    def taken(batch: Batch) -> jax.Array:
        slots = slots_of(batch)
        assert slots is not None
        absent = jnp.where(present(batch), table.absent(lookup), -1)
        return jnp.where(slots < 0, absent, slots)

    slots = over_explicit_axes(taken, batch, lambda: like_segments(batch, 2))
    return dataclasses.replace(batch, slots=slots)


def require_hash_table(table: Any, caller: str = "") -> HashTable:
    """Returns the table; raises for other kinds, with the name of the table and of the method of a layer."""
    if isinstance(table, HashTable):
        return table
    several = getattr(table, "tables", None)
    advice = "jax_tt.hash_table(1024, 16)"
    if isinstance(several, Mapping):
        hashed = next((name for name, one in several.items() if one.ids.takes_keys), "name")
        advice = f"collection.tables[{hashed!r}] with state[{hashed!r}]"
    label = table.ids.label if isinstance(table, Table) else ""
    raise TypeError(
        f"{caller}{label}table: got {type_of(table)}; expected a HashTable, e.g. {advice}."
    )


def unsharded_hash_table(table: Any, caller: str = "") -> HashTable:
    """Returns the table, or the `HashTable` that a `ShardedTable` shards; raises for other kinds."""
    return require_hash_table(unsharded(table) if isinstance(table, Table) else table, caller)


def checked_hash_table(table: Any, state: Any) -> HashTable:
    """Returns the `unsharded_hash_table`; raises for a state that is not one of ``table``."""
    whole = unsharded_hash_table(table)
    check_table(table, state)
    check_state(table, state)
    return whole


def _check_table(table: Table) -> None:
    if table.ids.takes_keys:
        got = "a HashTable"
        raise mismatch("table", got, "a table of numbered rows, e.g. a DenseTable", error=TypeError)
    inner = innermost(table)
    if inner.spec.row_names and not table.spec.row_names:
        got = f"{type_of(table)} around {type_of(inner)}"
        expected = f"the {type(inner).__name__} itself, since slots are its rows in any order"
        raise mismatch("table", got, expected, error=TypeError)


def _check_capacity(label: str, capacity: int, ways: Any) -> None:
    if capacity % as_int(f"{label}ways", ways, 1, MAX_WAYS):
        got = f"{ways} for a capacity of {capacity}"
        fix = f"Use the capacity {-(-capacity // ways) * ways}, or other ways."
        raise mismatch(f"{label}ways", got, "a divisor of it", fix)
    as_int(f"{label}capacity", capacity, 1, 2**31 - 1)


def _check_most(capacity: int, most: int) -> None:
    if not capacity <= most < 2**31:
        got = f"{most} for a capacity of {capacity}"
        raise mismatch("max_capacity", got, "at least that, and less than 2**31")
    below = capacity << ((most // capacity).bit_length() - 1)
    if below != most:
        sizes = " or ".join(str(size) for size in (below, 2 * below) if size < 2**31)
        got = f"{most} for a capacity of {capacity}, which growth doubles"
        raise mismatch("max_capacity", got, f"that times a power of 2, e.g. {sizes}")


def _check_missing(missing: Any, capacity: int) -> None:
    if isinstance(missing, str) or missing is None:
        one_of("missing", missing, MISSING, ", or the number of a row")
    else:
        as_int("missing", missing, 0, capacity - 1)


@best_rows.register(HashTable)
def best_keys(table: HashTable, state: State, queries: Queries) -> tuple[jax.Array, SplitIds]:
    """`best_rows` with keys for ids, unsigned ones in ascending order among equal scores."""
    directory = directory_of(state)
    inner = dataclasses.replace(
        queries,
        exclude=_slots(table, state, queries),
        present=directory.touched.reshape(-1) > 0,
    )
    scores, slots = best_rows(table.table, state, inner)
    found = jnp.maximum(slots, 0)
    words = directory.keys[found // table.ways, :, found % table.ways]
    words = jnp.where(slots[..., None] < 0, jnp.uint32(2**32 - 1), words)
    scores, high, low = in_order(scores, [words[..., 0], words[..., 1]], queries.k)
    return scores, SplitIds(lax.bitcast_convert_type(jnp.stack([high, low], -1), jnp.int32))


def _slots(table: HashTable, state: State, queries: Queries) -> jax.Array:
    """The slots of excluded keys, -1 for those that have none."""
    digits = queries.exclude.reshape(-1, 3)
    keys = lax.bitcast_convert_type(digits[:, 1:], jnp.uint32)
    search = table.search_of(state, keys, digits[:, 0] >= 0, Lookup(train=False))
    (slots,) = hash_backend.find_many([search._replace(absent=-1)], [queries.method])
    return slots.reshape(queries.exclude.shape[:2])


_ADVICE = (
    "expected all keys and rows of a hash table on every device, since each of them inserts and removes all keys, and "
    "the table would be gathered. Give every device the rows of its keys, with jax_tt.shard_tables(tables, mesh, "
    "axis), EmbedCollection(..., mesh=mesh, axis=axis) or a jax_tt.tables.ShardedTable, or replicate the table, "
    "jax.device_put(state, NamedSharding(mesh, P()))."
)


def clock_of_whole(table: HashTable, state: State) -> jax.Array:
    """The number of batches of a table, from a state without shards.

    Raises:
        ValueError: an array that keys are inserted into is sharded; in a traced call on a mesh with automatic axes
            once XLA partitions the program.
    """
    names = (*table.table.spec.row_arrays, *table.hash_shapes)
    # Rows of a stack are sharded as it is.
    arrays = {name: x.array if isinstance(x := state[name], StackRows) else x for name in names}
    return state[CLOCK] + check_unsharded(arrays, table.ids.label, _ADVICE)
