"""`RowCachedTable`: a tensor-train table that reads hot rows from a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_tt._base.arguments import instance_of
from jax_tt._base.dtypes import accumulator
from jax_tt._base.storage import check_storage
from jax_tt._directories.cache_directory import CacheDirectory, init_directory
from jax_tt._directories.row_cache import RowCache
from jax_tt._ids.batch import Batch, present
from jax_tt._ids.explicit import like_segments, over_explicit_axes
from jax_tt._jax import backend as _backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._kinds.cached.keys import cache_keys, count_batch, hits_of, misses_of
from jax_tt._native import cache_backend
from jax_tt._native.cache_forward import cache_forward
from jax_tt._native.rows import RowTable
from jax_tt._native.table_call import run
from jax_tt._native.table_group import zeros_like
from jax_tt._native.tt import TrainTable
from jax_tt._table import reference
from jax_tt._table.check import check_state, check_wrapper
from jax_tt._table.groups import BoundTable, Call, weights_gradient
from jax_tt._table.options import Lookup, NeededCotangents, StepInputs
from jax_tt._table.reference import ReferenceTable
from jax_tt._table.state import Array, State, StateSpec
from jax_tt._table.step_values import step_values
from jax_tt._table.table import Execution, Table
from jax_tt._table.whole import attend, to_dense
from jax_tt._table.wrapper import Wrapper, find

_PREFIX = "cache_"
DIRECTORY = tuple(f"{_PREFIX}{field}" for field in CacheDirectory._fields)
ROWS = "cache_rows"
COLLECTION = "row_cache"


def cache_directory_of(state: State) -> CacheDirectory:
    return CacheDirectory(*(state[name] for name in DIRECTORY))


def named_cache_directory(directory: CacheDirectory) -> dict[str, Any]:
    return dict(zip(DIRECTORY, directory, strict=True))


def outer(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the rows table under its names in the combined state."""
    return {outer_name(name): value for name, value in state.items()}


def outer_name(name: str) -> str:
    """The name in the combined state of an array of the rows table."""
    if name == "embedding":
        return ROWS
    return f"{_PREFIX}{name.removesuffix('_0')}"


@dataclasses.dataclass(frozen=True)
class RowCachedTable(Wrapper):
    """A tensor-train table with a `RowCache`. It is itself a `Table`.

    Its state has the arrays of the table, the cached rows and their optimizer state (``cache_rows``, ``cache_slot_*``,
    ``cache_step`` and so on), and the directory. `maintain` refreshes the cache when it is due.

    Attributes:
        table: the `TTTable`.
        cache: sizes and policy.

    >>> import jax, jax_tt
    >>> train = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(1000, 8, ranks=4))
    >>> table = jax_tt.tables.RowCachedTable(train, jax_tt.RowCache(50, ways=5))
    >>> table.init(jax.random.key(0))["cache_rows"].shape
    (50, 8)
    """

    cache: RowCache

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "None or a RowCache, e.g. cache=jax_tt.RowCache(capacity=10_000)"
        instance_of("cache", self.cache, RowCache, expected)
        fix = "An order goes around a cache: OrderedTable(RowCachedTable(table, cache), id_order)."
        instance_of("table", self.table, TrainTable, "a TTTable", fix)
        self.cache.layout(self.num_embeddings)
        self.cache.key_dtype(self.num_embeddings)

    @property
    def trains_rows(self) -> bool:
        """Whether gradients of hits go to the cached rows; otherwise the rows are copies."""
        return self.cache.gradients == "rows"

    @functools.cached_property
    def rows_table(self) -> RowTable:
        """The cached rows as a table, one row per slot."""
        sets, ways, _, _ = self.cache.layout(self.num_embeddings)
        return RowTable(
            sets * ways,
            self.features,
            update=self.update if self.trains_rows else None,
            name=self.name,
        )

    @property
    def slots(self) -> dict[str, Any]:
        """The optimizer state of cached rows by name, and what it is for a new row."""
        arrays = self.rows_table.spec.arrays
        return {outer_name(x.name): x.initial for x in arrays if x.role == "slot"}

    @functools.cached_property
    def spec(self) -> StateSpec:
        rows = self.rows_table.spec
        names = {array.name: outer_name(array.name) for array in rows.arrays}
        facts: dict[str, Any] = {"by_row": False, "unit": 1}
        if not self.trains_rows:
            facts |= {"unit": None, "role": "constant", "collection": COLLECTION}
        layout = self.cache.layout(self.num_embeddings)
        key_dtype = self.cache.key_dtype(self.num_embeddings)
        hint = (
            f"Its cache has {layout[0]} sets of {layout[1]} ways, and {layout[2]} buckets of {layout[3]} counters; "
            "jax_tt.cache.resize changes the cache of a table and of its state."
        )
        directory = (
            Array(name, "buffer", like.shape, like.dtype, collection=COLLECTION, hint=hint)
            for name, like in _directory_types(*layout, key_dtype).items()
        )
        return self.table.spec.without_rows().extended(*directory, *rows.renamed(names, **facts))

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        return {**self.table.init_rest(params), **self.init_cache(self.table.spec.storage(params))}

    def init_cache(self, storage: Any) -> dict[str, jax.Array]:
        """An empty cache for a table with parameters of dtype ``storage``."""
        sets, ways, buckets, room = self.cache.layout(self.num_embeddings)
        key_dtype = self.cache.key_dtype(self.num_embeddings)
        directory = init_directory(sets, ways, buckets, room, key_dtype)
        table = self.rows_table
        shape = (table.num_embeddings, table.features)
        rows = {"embedding": jnp.zeros(shape, self.cache.dtype or storage)}
        return named_cache_directory(directory) | outer(rows | table.init_rest(rows))

    def execution(self, lookup: Lookup, state: State) -> Execution:
        storage = accumulator(state[ROWS].dtype, self.spec.storage(state))
        method = _backend.choose(lookup.method, storage)
        differentiable = method == "reference" and self.trains_rows and self.update is None
        return Execution(method, differentiable=differentiable)

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        """Finds the slots of a batch and, in training, counts it."""
        directory = jax.lax.stop_gradient(cache_directory_of(state))

        def probed(inputs: tuple[Batch, jax.Array]) -> tuple[jax.Array, jax.Array]:
            batch, tags = inputs
            keys = cache_keys(self, batch, lookup.bounds, tags.dtype)
            return keys, cache_backend.probe(tags, keys, lookup.method)

        def counted(inputs: tuple[CacheDirectory, jax.Array, jax.Array]) -> CacheDirectory:
            return count_batch(*inputs, self.cache.scoring, lookup.method, lookup.axis_name)

        keys, slots = over_explicit_axes(
            probed, (batch, directory.tags), lambda: (like_segments(batch, 2),) * 2
        )
        if lookup.train:
            whole = jax.tree.map(lambda _: P(), directory)
            directory = over_explicit_axes(counted, (directory, keys, slots), whole)
        return {**state, **named_cache_directory(directory)}, dataclasses.replace(
            batch, slots=slots
        )

    def forward(self, state: State, batch: Batch, lookup: Lookup) -> tuple[jax.Array, Any]:
        """Sums over hits and misses; for the backward pass the misses, their positions, and residuals of both."""
        batches = hits_of(batch), misses_of(self.table, batch)
        if self.trains_rows:
            return self.divided_forward(self._states(state), batches, lookup)
        # In the backward pass, only the table has gradients; it makes another plan.
        lookup = lookup.replace(wanted=NeededCotangents())
        sums, _ = self.divided_forward(self._states(state), batches, lookup)
        return sums, sums

    def divided_forward(
        self, states: tuple[State, State], batches: tuple[Batch, Batch], lookup: Lookup
    ) -> tuple[jax.Array, Any]:
        """`forward` of a batch split into hits and misses, with the states of the table and of the rows.

        On the CPU, one op adds the hits of a bag in the order of their positions, then its misses. Elsewhere, and if
        rows and cores have different accumulator types, hits and misses are summed separately and then added.
        """
        axes = varying_axes(*states, *batches)
        states, batches = vary_over((states, batches), axes)

        def native(platform: str, of_tables: Any, of_rows: Any, hits: Batch, misses: Batch) -> Any:
            types = of_rows["embedding"].dtype, self.table.spec.storage(of_tables)
            if platform == "cpu" and len(set(map(accumulator, types))) == 1:
                result = self._on_cpu(of_tables, of_rows, hits, misses, lookup)
            else:
                result = self._composed(
                    partial(_native_forward, platform), of_tables, of_rows, (hits, misses), lookup
                )
            return vary_over(result, axes)

        def reference(of_tables: Any, of_rows: Any, hits: Batch, misses: Batch) -> Any:
            sums, residuals = self._composed(
                ReferenceTable.forward, of_tables, of_rows, (hits, misses), lookup
            )
            if lookup.method != "reference":
                platform = _backend.native_platforms()[0]
                arrays = (of_tables, of_rows, hits, misses)
                _, saved = jax.eval_shape(partial(native, platform), *arrays)
                residuals = (*residuals[:2], zeros_like(saved[2]))
            return vary_over((sums, residuals), axes)

        return _backend.run(lookup.method, native, reference, *states, *batches)

    def backward(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self._cotangents(state, batch, residuals, g, lookup, ((), ()))

    def step(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        return self._cotangents(state, batch, residuals, g, lookup, values)

    def _states(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """The states of the table and of the rows table, each under its own names."""
        table = {name: state[name] for name in self.table.spec.trained_names if name in state}
        names = {name: outer_name(name) for name in self.rows_table.spec.trained_names}
        return table, {name: state[outer] for name, outer in names.items() if outer in state}

    def _on_cpu(
        self, of_table: State, of_rows: State, hits: Batch, misses: Batch, lookup: Lookup
    ) -> tuple[jax.Array, Any]:
        sentinels = of_table.get("sentinel"), of_rows.get("sentinel")
        cores, rows = self.table.spec.params(of_table), of_rows["embedding"]
        sums, packed, place, saved = cache_forward(
            self.table, cores, rows, misses, hits.ids, lookup, sentinels
        )
        return sums, (packed, place, (saved[2:], saved))

    def _composed(
        self,
        forward: Any,
        of_table: State,
        of_rows: State,
        batches: tuple[Batch, Batch],
        lookup: Lookup,
    ) -> tuple[jax.Array, Any]:
        """`forward` with one op for the hits and one for the misses, which keep their positions."""
        hits, misses = batches
        hit_sum, of_hits = forward(self.rows_table, of_rows, hits, _of_rows(lookup))
        miss_sum, of_misses = forward(self.table, of_table, misses, lookup)
        place = None
        if misses.weights is not None:
            place = jax.lax.broadcasted_iota(jnp.int32, misses.ids.shape[:2], 1)
        misses = dataclasses.replace(misses, rectangular=False)
        return _added(miss_sum, hit_sum), (misses, place, (of_hits, of_misses))

    def _in_range(self, of_rows: State, batch: Batch, g: jax.Array, lookup: Lookup) -> jax.Array:
        """1.0, or 0.0 where ``bounds`` refuses an id of any shard of the batch that the rows are stepped for."""
        axes = reference.summed_axes(self.rows_table, of_rows, hits_of(batch), g, lookup)
        misses = vary_over(misses_of(self.table, batch), varying_axes(batch, g))
        bad = reference.poisoned(self.table, misses, lookup, axes)
        return jnp.where(bad, 0.0, 1.0).astype(jnp.float32)

    def _cotangents(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[dict[str, Any], jax.Array | None]:
        """Cotangents of the state and of the weights; for fused parts, these are the new values."""
        of_table, of_rows = self._states(state)
        if not self.trains_rows:
            batch = dataclasses.replace(batch, slots=None)
            params = self.table.spec.params(of_table)
            plan = self.table.plan(params, batch, residuals, lookup)
            new, _, dweights = _part_cotangents(
                self.table, of_table, batch, (plan, g), lookup, values[0]
            )
            return new, dweights
        packed, place, (of_hits, of_misses) = residuals
        row_names = {outer_name(name) for name in self.rows_table.spec.trained_names}
        for_cores = _without(lookup, row_names)
        for_rows = _of_rows(_without(lookup, set(self.table.spec.trained_names)))

        def of_hit_rows(of_rows: State, lookup: Lookup, allowed: jax.Array | None) -> Any:
            return _part_cotangents(
                self.rows_table, of_rows, hits_of(batch), (of_hits, g), lookup, values[1], allowed
            )

        # Cores and rows are updated together or not at all. Only ids of the cores can be out of range, so the rows are
        # updated last; if nonfinite gradients of the rows also cancel the step, a call with allowed=0 checks them.
        allowed = None
        skips = self.update is not None and self.update.skip_nonfinite
        if skips and for_cores.wanted.names and for_rows.wanted.names:
            wanted = dataclasses.replace(for_rows.wanted, weights=False)
            ask = dataclasses.replace(for_rows, wanted=wanted)
            # Uses the returned rows, which are unchanged: keeping the original ones would cost a copy.
            of_rows, allowed, _ = of_hit_rows(of_rows, ask, jnp.zeros((), jnp.float32))
        of_table, applied, of_packed = _part_cotangents(
            self.table, of_table, packed, (of_misses, g), for_cores, values[0], allowed
        )
        applied = applied if allowed is None else allowed * applied
        if self.update is not None and for_rows.wanted.names and not for_cores.wanted.names:
            # Frozen cores take no step that would find ids out of range, and the rows cannot see such ids.
            applied = self._in_range(of_rows, batch, g, for_cores)
        of_rows, _, dweights = of_hit_rows(of_rows, for_rows, applied)
        if of_packed is not None and dweights is not None and place is not None:
            missed = jnp.take_along_axis(of_packed, place, axis=1)
            here = present(misses_of(self.table, batch))
            dweights = _added(dweights, jnp.where(here, missed, 0))
        return of_table | outer(of_rows), dweights


@to_dense.register(RowCachedTable)
def with_cached_rows(table: RowCachedTable, state: State) -> jax.Array:
    dense = to_dense(table.table, state)
    tags = cache_directory_of(state).tags.reshape(-1)
    there = jnp.where(tags >= 0, tags, table.num_embeddings)
    return dense.at[there].set(state[ROWS].astype(dense.dtype), mode="drop")


@attend.register(RowCachedTable)
def attend_cached(
    table: RowCachedTable, state: State, query: jax.Array, precision: Any
) -> jax.Array:
    """Scores cached rows by their cached values; the gradient of copies goes to the cores."""
    scores = attend(table.table, state, query, precision)
    tags = cache_directory_of(state).tags
    there = jnp.where(tags >= 0, tags, table.num_embeddings).reshape(-1)
    cached = jnp.einsum("bd,sd->bs", query, state[ROWS], precision=jax.lax.Precision.HIGHEST)
    if not table.trains_rows:
        copied = scores.at[..., there].get(mode="fill", fill_value=0)
        cached = copied + jax.lax.stop_gradient(cached - copied)
    return scores.at[..., there].set(cached.astype(scores.dtype), mode="drop")


@step_values.register(RowCachedTable)
def step_values_of_parts(table: RowCachedTable, state: State, inputs: StepInputs) -> Any:
    of_table, of_rows = table._states(state)
    return step_values(table.table, of_table, inputs), step_values(
        table.rows_table, of_rows, inputs
    )


@weights_gradient.register(RowCachedTable)
def weights_gradient_of_parts(
    table: RowCachedTable, state: State, batch: Batch, g: jax.Array, lookup: Lookup
) -> jax.Array:
    if table.trains_rows:
        return weights_gradient.dispatch(Table)(table, state, batch, g, lookup)
    of_table, _ = table._states(state)
    batch = dataclasses.replace(batch, slots=None)
    return weights_gradient(table.table, of_table, batch, g, lookup)


@check_state.register(RowCachedTable)
def check_cache(table: RowCachedTable, state: State) -> None:
    check_wrapper(table, state)
    check_storage(table.ids.label, ROWS, {state[ROWS].dtype.name})


def cached_part(table: Table) -> RowCachedTable:
    """The table with a row cache that ``table`` is or wraps.

    Raises:
        ValueError: there is none.
    """
    cached = find(table, RowCachedTable)
    if cached is None:
        raise ValueError(
            f"{table.ids.label or 'table: '}has no row cache; build it with cache=jax_tt.RowCache(capacity=...)."
        )
    return cached


@functools.lru_cache(maxsize=256)
def _directory_types(*sizes: Any) -> dict[str, Any]:
    """Shapes and types of the directory of `init_directory`."""
    return named_cache_directory(jax.eval_shape(lambda: init_directory(*sizes)))


def _of_rows(lookup: Lookup) -> Lookup:
    return lookup.replace(bounds="unchecked")


def _without(lookup: Lookup, names: set[str]) -> Lookup:
    wanted = dataclasses.replace(lookup.wanted, names=lookup.wanted.names - names)
    return lookup.replace(wanted=wanted)


def _native_forward(
    platform: str, table: Any, state: State, batch: Batch, lookup: Lookup
) -> tuple[jax.Array, Any]:
    return run([table.calls.forward(platform, Call(BoundTable(table, lookup), state, batch, ()))])[
        0
    ]


def _part_cotangents(
    table: ReferenceTable,
    state: State,
    batch: Batch,
    saved: tuple[Any, jax.Array],
    lookup: Lookup,
    values: Any,
    allowed: jax.Array | None = None,
) -> tuple[dict[str, Any], Any, jax.Array | None]:
    """Cotangents of one of the two tables, and of the weights of its lookups.

    The second result is that of `Table.step_if`, or None without a step.
    """
    residuals, g = saved
    accum = accumulator(table.spec.storage(state))
    g = g.astype(accum)  # the sum is wider if the other table is
    batch = dataclasses.replace(batch, slots=None)
    if batch.weights is not None:
        batch = dataclasses.replace(batch, weights=batch.weights.astype(accum))
    if not lookup.wanted.names:
        if not lookup.wanted.weights:
            return {}, None, None
        return {}, None, weights_gradient(table, state, batch, g, lookup)
    if table.update is None:
        grads, dweights = table.backward(state, batch, residuals, g, lookup)
        return grads, None, dweights
    return table.step_if(allowed, state, batch, residuals, g, lookup, values)


def _added(left: jax.Array, right: jax.Array) -> jax.Array:
    """Sum in the accumulator type of both: cores may be float64 and rows narrower."""
    wide = accumulator(left.dtype, right.dtype)
    return left.astype(wide) + right.astype(wide)
