"""Counts the requests of every table of a collection, and `StatisticsReporter`, which logs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_tt._base import words
from jax_tt._base.arguments import as_int, as_positive, instance_of, mismatch, type_of
from jax_tt._ids.batch import Batch, present
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._ids.id_space import IdSpace, digits_in_range
from jax_tt._jax.vma import all_shards, axes_to_count, summed_like
from jax_tt._table.change import has_cache
from jax_tt._table.distinct_rows import no_row
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table
from jax_tt._table.wrapper import is_sharded

# In the state of a collection, and the name of their linen collection.
STATISTICS = "statistics"
TOTALS = "totals"
# Of a table with at most so many rows per id, distinct rows are marked in an array with an element for every row, which
# takes a fraction of the time of a sort.
_ROWS_PER_ID = 16


class TableStatistics(NamedTuple):
    """Totals of one table, as `Collection.statistics` returns them.

    Attributes:
        requests: ids looked up, including those out of range; padding is not counted.
        unique: distinct rows that they read, batch by batch. The features of a table are one batch.
        out_of_range: ids that are no row of the table.
        cache_hits: ids whose row was cached; None without a row cache.

    >>> import jax_tt
    >>> jax_tt.pipeline.TableStatistics(requests=4, unique=3, out_of_range=0, cache_hits=None).unique
    3
    """

    requests: int
    unique: int
    out_of_range: int
    cache_hits: int | None


_NONE = TableStatistics(0, 0, 0, 0)
# For every count, a low and a high word.
TOTALS_SHAPE = (len(TableStatistics._fields), 2)


def init_totals(tables: Iterable[str]) -> dict[str, jax.Array]:
    """Totals of nothing, by table."""
    return {name: jnp.zeros(TOTALS_SHAPE, jnp.uint32) for name in tables}


def check_countable(tables: Mapping[str, Table]) -> None:
    """Raises for tables whose rows are not known where the batch is."""
    for name, table in tables.items():
        if table.ids.takes_keys and is_sharded(table):
            got = f"the table {name!r}, a sharded HashTable, whose shards look the keys up"
            fix = "dynamic.insert and dynamic.statistics count their requests."
            raise mismatch("statistics", got, "a collection without such tables", fix)


def read_totals(
    tables: Mapping[str, Table], totals: Mapping[str, jax.Array]
) -> dict[str, TableStatistics]:
    """Totals by table. Blocks until the device is done."""
    counts = jax.device_get(dict(totals))
    every = {name: TableStatistics(*words.integers(counts[name]).tolist()) for name in tables}
    return {
        name: one if has_cache(tables[name]) else one._replace(cache_hits=None)
        for name, one in every.items()
    }


class CountedBatch(NamedTuple):
    """A batch of a table to count.

    Attributes:
        table: the table.
        lookup: its options.
        given: the batch as it was given, over whose shards it is counted.
        prepared: the batch of `Table.prepare`: its rows and, with a row cache, slots.
    """

    table: Table
    lookup: Lookup
    given: Batch
    prepared: Batch


def count_batches(
    totals: Mapping[str, jax.Array], counted: Mapping[str, CountedBatch]
) -> dict[str, jax.Array]:
    """The totals uint32 ``[columns, 2]`` by table after one more batch of each, the same on all devices.

    Under ``vmap``, all examples are counted in totals that are not mapped themselves.
    """
    described, batches = [], []
    # One array, so that there is one sum over devices.
    joined = jnp.stack([totals[name] for name in counted])
    for table, lookup, given, prepared in counted.values():
        described.append((table.ids, lookup.bounds, axes_to_count(joined, given, lookup.axis_name)))
        # Parameters of other devices mark a prepared batch as theirs: it is taken only where it is another.
        batch = prepared if table.spec.buffers else given
        batches.append(dataclasses.replace(batch, weights=None))

    def count(inputs: tuple[jax.Array, Sequence[Batch]]) -> jax.Array:
        return _counted(tuple(described), *inputs)

    after = over_explicit_axes(count, (joined, batches), P())
    return {name: after[k] for k, name in enumerate(counted)}


@partial(jax.jit, static_argnums=0, inline=True)
def _counted(
    described: Sequence[tuple[IdSpace, str, Any]], totals: jax.Array, batches: Sequence[Batch]
) -> jax.Array:
    counts = [
        _counts(space, bounds, axes, batch)
        for (space, bounds, axes), batch in zip(described, batches, strict=True)
    ]
    return words.added(totals, summed_like(totals[..., 0], jnp.stack(counts)))


def _counts(space: IdSpace, bounds: str, axes: Any, batch: Batch) -> jax.Array:
    """The counts of one batch in the order of `TableStatistics`, uint32 ``[4]``."""
    here = present(batch)
    rows, inside = _rows(space, batch)
    reads = here if bounds == "clip" else here & inside
    hits = jnp.zeros_like(here) if batch.slots is None else batch.slots >= 0
    masks = jnp.stack([here, here & ~inside, hits])
    requests, outside, hit = jnp.sum(masks, axis=(1, 2), dtype=jnp.uint32)
    rows = [jnp.where(reads, rows[0], no_row(rows[0])), *rows[1:]]
    rows = [row.reshape(-1) for row in rows]
    if axes:
        requests, outside, hit = lax.psum((requests, outside, hit), axes)
        rows = [all_shards(row, axes) for row in rows]
    return jnp.stack([requests, _distinct(rows, space.num_embeddings), outside, hit])


def _rows(space: IdSpace, batch: Batch) -> tuple[list[jax.Array], jax.Array]:
    """The row of every position, clamped to the table and in as many parts as it needs, and whether it was in range."""
    rows = space.num_embeddings
    if not batch.split:
        space = IdSpace(rows, (rows,) if rows < 2**31 else (-(-rows // 2**30), 2**30))
    digits, inside = digits_in_range(space, batch)
    if rows >= 2**31:
        return digits, inside
    row = jnp.zeros_like(digits[0], jnp.int32)
    for digit, factor in zip(digits, space.radices, strict=True):
        row = row * factor + digit.astype(jnp.int32)
    return [row], inside


def _distinct(rows: list[jax.Array], num_embeddings: int) -> jax.Array:
    """The number of distinct rows other than marked ones, uint32."""
    first = rows[0]
    # The size of a symbolic batch is not known here.
    one_part = len(rows) == 1 and isinstance(first.size, int)
    if one_part and num_embeddings <= _ROWS_PER_ID * first.size:
        marks = jnp.zeros(num_embeddings, bool).at[first].set(True, mode="drop")
        return jnp.sum(marks, dtype=jnp.uint32)
    parts = lax.sort(rows, num_keys=len(rows))
    new = jnp.zeros(first.shape, bool).at[:1].set(True)
    for part in parts:
        new = new.at[1:].set(new[1:] | (part[1:] != part[:-1]))
    return jnp.sum(new & (parts[0] != no_row(first)), dtype=jnp.uint32)


class StatisticsReporter:
    """Writes the statistics of a collection every few steps of a training loop.

    For every table it writes the totals ``requests``, ``unique``, ``out_of_range`` and ``cache_hits``, and, of the
    requests since the last time, the ``unique_share``, ``out_of_range_share`` and ``cache_hit_rate``; the latter and
    the hits only for a table with a row cache, and the shares only if there were requests.

    Args:
        every: it writes in the steps that are multiples of this number. It reads nothing in the others, so that the
            host does not wait for the device there.
        write: a function ``write(tag, value, step)``, such as ``tf.summary.scalar``, or an object with a method
            ``add_scalar`` of that kind, such as a writer of TensorBoard.
        prefix: of the tags, which are ``"embedding/user/requests"`` and so on.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> collection = jax_tt.Collection(
    ...     {"ad": jax_tt.dense_table(50, 8)}, {"shown": jax_tt.Feature("ad")}
    ... )
    >>> state = collection.with_statistics(collection.init(jax.random.key(0)))
    >>> reporter = jax_tt.pipeline.StatisticsReporter(2, lambda tag, value, step: print(step, tag, value))
    >>> for step in range(1, 4):
    ...     rows, state = jax_tt.lookup_features(collection, state, {"shown": jnp.array([[1, 1]])})
    ...     reporter(step, lambda: collection.statistics(state))
    2 embedding/ad/requests 4
    2 embedding/ad/unique 2
    2 embedding/ad/out_of_range 0
    2 embedding/ad/unique_share 0.5
    2 embedding/ad/out_of_range_share 0.0
    """

    def __init__(self, every: int, write: Any, *, prefix: str = "embedding") -> None:
        self._every = as_positive("every", every)
        self._write: Callable[[str, float, int], Any] = getattr(write, "add_scalar", write)
        if not callable(self._write):
            expected = "a function write(tag, value, step), or an object with a method add_scalar(tag, value, step)"
            raise mismatch("write", type_of(write), expected, error=TypeError)
        self._prefix = prefix
        self._last: Mapping[str, TableStatistics] = {}

    def __call__(self, step: int, read: Callable[[], Mapping[str, TableStatistics]]) -> None:
        """Writes if ``step`` is a multiple of ``every``.

        Args:
            step: number of the step.
            read: returns the statistics by table, e.g. the method ``embed.statistics`` of an `EmbedCollection`.
        """
        if not callable(read):
            expected = "a function that returns statistics: embed.statistics without parentheses"
            raise mismatch("read", type_of(read), expected, error=TypeError)
        step = as_int("step", step)
        if step % self._every:
            return
        statistics = read()
        expected = "the statistics by table, as embed.statistics returns them"
        instance_of("read()", statistics, Mapping, expected)
        for table, totals in statistics.items():
            for name, value in _scalars(totals, self._last.get(table, _NONE)).items():
                self._write(f"{self._prefix}/{table}/{name}", value, step)
        self._last = statistics


def _scalars(totals: TableStatistics, last: TableStatistics) -> dict[str, float]:
    """The values to write for a table, by name."""
    if totals.requests < last.requests:  # counted anew
        last = _NONE
    values: dict[str, float] = totals._asdict()
    requests = totals.requests - last.requests
    if requests:
        values["unique_share"] = (totals.unique - last.unique) / requests
        values["out_of_range_share"] = (totals.out_of_range - last.out_of_range) / requests
    if totals.cache_hits is None:
        del values["cache_hits"]
    elif requests:
        values["cache_hit_rate"] = (totals.cache_hits - (last.cache_hits or 0)) / requests
    return values
