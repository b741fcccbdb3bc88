"""How a sample of ids loads the devices under a placement, and `plan_exchange`: messages that suit it."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_positive, expect, expect_ids, mismatch, one_of, type_of
from jax_tt._ids.placement import Layout, paged
from jax_tt._kinds.sharded.options import Exchange
from jax_tt._kinds.sharded.route import Route, distinct, leading_bits, message_rows
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._kinds.sharded.travels import rows_of_message

# Bags of a step whose ids are not given.
DEFAULT_BATCH = 1024


class Sample(NamedTuple):
    """The ids of a table in some steps.

    Attributes:
        ids: ``[steps, devices, n]``, each device's part of the batch; -1 for padding.
        length: ids of a bag.
    """

    ids: np.ndarray[Any, Any]
    length: int

    @property
    def per_device(self) -> int:
        """Ids that a device looks up in a step, with padding."""
        return self.ids.shape[2]

    def parts(self) -> tuple[Sample, Sample]:
        """Some steps to make a placement from, and others to judge it by; the same object if there is one step."""
        half = self.ids.shape[0] // 2
        if not half:
            return self, self
        return self._replace(ids=self.ids[:half]), self._replace(ids=self.ids[half:])

    def positions(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """All ids but padding: ``step * devices + device``, and the id."""
        steps, devices, count = self.ids.shape
        part, ids = np.repeat(np.arange(steps * devices), count), self.ids.reshape(-1)
        return part[ids >= 0], ids[ids >= 0]

    def requests(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """`positions` without ids that the device has asked for before in its step, in ascending order."""
        part, ids = self._replace(ids=np.sort(self.ids, axis=2)).positions()
        first = np.ones(len(ids), bool)
        first[1:] = (part[1:] != part[:-1]) | (ids[1:] != ids[:-1])
        return part[first], ids[first]


def sample_of(label: str, ids: Any, num_embeddings: int, devices: int, steps: int) -> Sample:
    """Divides ids ``[steps * B, L]`` or ``[n]`` among the devices; errors begin with ``label``."""
    array = np.asarray(ids)
    expect(array.dtype.kind in "iu", label, array, "integers", error=TypeError)
    length = array.shape[-1] if array.ndim > 1 else 1
    if not array.size or array.size % (steps * length):
        expected = f"the ids of steps={steps} batches of equal size, [steps * batch, ids per bag]"
        raise mismatch(label, array, expected)
    expect_ids(label, np.maximum(array.reshape(-1), 0), num_embeddings)
    bags = array.reshape(steps, -1, length).astype(np.int64)
    spare = -bags.shape[1] % devices
    bags = np.concatenate([bags, np.full((steps, spare, length), -1)], axis=1)
    return Sample(np.maximum(bags.reshape(steps, devices, -1), -1), length)


def uniform_sample(num_embeddings: int, devices: int) -> Sample:
    """Random ids, for a table whose requests are not known."""
    bags = -(-DEFAULT_BATCH // devices)
    rng = np.random.default_rng(0)
    return Sample(rng.integers(0, num_embeddings, (1, devices, bags)), 1)


class Load(NamedTuple):
    """Rows of a step, under a placement.

    Attributes:
        read: that every device reads for the others and itself, ``[devices]``.
        stepped: whose gradients arrive at every device, ``[devices]``.
        rounds: of the exchange, 1 unless the rows for a device exceed its messages.
        sent: places for rows in the messages of a device, forward and backward.
        fits: whether the messages hold all ids, if sums of bags travel.
    """

    read: np.ndarray[Any, Any]
    stepped: np.ndarray[Any, Any]
    rounds: int
    sent: tuple[int, int]
    fits: bool


def load_of(sample: Sample, layout: Layout) -> Load:
    """The load of the devices by the requests of a sample."""
    steps, devices, count = sample.ids.shape
    part, rows = sample.requests()
    page, row = pages_of(layout, rows)
    places = layout.page_table[page]
    # As in the exchange: devices share the replicas of a page, and gradients go to all of them.
    copies = (places >= 0).sum(axis=1)
    first = places[np.arange(len(places)), part % devices % copies]
    asked = _sent(layout, part, first, row)
    at, replica = np.nonzero(places >= 0)
    given = _sent(layout, part[at], places[at, replica], row[at])
    counts = count, count * layout.replicas
    bits = max(asked.bits(counts[0], devices), given.bits(counts[1], devices))
    read, stepped = (np.bincount(one.owner, minlength=devices) / steps for one in (asked, given))
    forward, backward = (devices * message_rows(each, devices) for each in counts)
    return Load(read, stepped, 2**bits, (forward, backward), _fits(sample, layout))


def _fits(sample: Sample, layout: Layout) -> bool:
    """Whether the messages hold all ids of every device, duplicates included."""
    part, ids = sample.positions()
    page, _ = pages_of(layout, ids)
    owner = layout.page_table[page, 0] // layout.pool
    _, counts = np.unique(part * sample.ids.shape[1] + owner, return_counts=True)
    return bool(counts.max(initial=0) <= rows_of_message(layout, sample.per_device))


def pages_of(layout: Layout, rows: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """`paged` of int64 rows on the host."""
    # Without 64-bit types, JAX would cut the rows of a table that has 2**31 or more.
    wide = jax.enable_x64(True) if rows.max(initial=0) >= 2**31 else contextlib.nullcontext()
    with wide:
        return [np.asarray(array) for array in paged(layout, jnp.asarray(rows))[:2]]


class _Sent(NamedTuple):
    """Rows that travel: from the part of a batch, to a device, and their places there, ``[n]`` each."""

    part: np.ndarray[Any, Any]
    owner: np.ndarray[Any, Any]
    row: np.ndarray[Any, Any]

    def bits(self, count: int, devices: int) -> int:
        """`leading_bits` of the part of a batch that has most rows for one device, of at most ``count`` rows."""
        pairs, counts = np.unique(self.part * devices + self.owner, return_counts=True)
        if counts.max(initial=0) <= message_rows(count, devices):
            return 0
        busiest = self.part == pairs[counts.argmax()] // devices
        # Of a fixed size, so that fewer programs are compiled.
        route = np.full((2, count), devices, np.int32)
        used = busiest.sum()
        route[0, :used], route[1, :used] = self.owner[busiest], self.row[busiest]
        return int(_bits(*route, devices))


@functools.partial(jax.jit, static_argnums=2)
def _bits(owner: jax.Array, row: jax.Array, devices: int) -> jax.Array:
    route = distinct(Route(owner, row), devices, "auto").route
    return leading_bits(route, message_rows(len(owner), devices), devices)


def _sent(layout: Layout, part: Any, places: Any, row: Any) -> _Sent:
    at = places % layout.pool * layout.page_size + row
    return _Sent(part, places // layout.pool, at.astype(np.int32))


def plan_exchange(
    table: ShardedTable, ids: Any, *, steps: int = 1, pooled: str = "rows", dtype: Any = None
) -> Exchange:
    """Counts a sample of ids, and returns the `Exchange` whose messages hold all of its batches.

    Without it, messages are sized for different ids that are spread evenly over the devices. With frequent ids, or a
    placement under which some devices have most of the ids of a batch, they are too large, or hold no batch, so that
    every step takes a second exchange.

    Args:
        table: a sharded table other than a hash table; its `Exchange` is not read.
        ids: integers ``[steps * batch, ids per bag]`` or ``[n]``, of all devices; negative ones are padding.
        steps: how many batches they are. Of several batches, the largest counts are taken.
        pooled: ``"rows"`` or ``"sums"``: the results that travel for bags.
        dtype: as in `Exchange`.

    >>> import jax, jax_tt, numpy as np
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> table = jax_tt.tables.ShardedTable(jax_tt.dense_table(1000, 16), mesh, "model", jax_tt.Placement.hashed())
    >>> jax_tt.planning.plan_exchange(table, np.array([[1, 2, 1, 1]])).expected_unique
    0.5
    """
    if not isinstance(table, ShardedTable) or table.ids.takes_keys:
        given = table.table if isinstance(table, ShardedTable) else table
        expected = "a ShardedTable of rows, e.g. of jax_tt.shard_tables"
        fix = "The keys of hash tables are spread evenly: expected_unique= is all that they need."
        raise mismatch("table", type_of(given), expected, fix, TypeError)
    one_of("pooled", pooled, ("rows", "sums"))
    steps = as_positive("steps", steps)
    sample = sample_of("ids", ids, table.num_embeddings, table.mesh.size, steps)
    part, rows = sample.requests()
    unique = max(int(np.bincount(part).max(initial=0)), 1)
    # Rows travel once for every device that asks for them, sums with all of their ids.
    sums = pooled == "sums"
    most = _most(table, *(sample.positions() if sums else (part, rows)))
    even = (sample.per_device if sums else unique) * table.layout.columns
    skew = max(1.0, most * table.layout.devices / even)
    return Exchange(dtype, unique / sample.per_device, pooled, skew)


def _most(table: ShardedTable, part: Any, rows: Any) -> int:
    """The most rows that a part of a batch asks of one device."""
    layout, mesh = table.layout, table.mesh
    if layout.columns > 1:  # every column shard gets all rows
        return int(np.bincount(part).max(initial=0))
    page, _ = pages_of(layout, rows)
    places = layout.page_table[page]
    # As in the exchange: devices share the replicas of a page by their number along the axes of the table.
    where = dict(
        zip(mesh.axis_names, np.unravel_index(part % mesh.size, mesh.devices.shape), strict=True)
    )
    sizes = [mesh.shape[name] for name in table.axes]
    turn = np.ravel_multi_index([where[name] for name in table.axes], sizes)
    owner = places[np.arange(len(places)), turn % (places >= 0).sum(axis=1)] // layout.pool
    return int(np.bincount(part * layout.devices + owner).max(initial=0))
