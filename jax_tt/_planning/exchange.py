"""`plan_exchange`: sizes of messages by a sample of ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tt._base.arguments import as_positive, one_of
from jax_tt._kinds.sharded.options import Exchange
from jax_tt._kinds.sharded.table import ShardedTable
from jax_tt._planning.load import Sample, pages_of, sample_of


def plan_exchange(
    table: ShardedTable, ids: Any, *, steps: int = 1, pooled: str = "rows", dtype: Any = None
) -> Exchange:
    """Counts a sample of ids, and returns the `Exchange` whose messages hold all of its batches.

    Without it, messages are sized for different ids that are spread evenly over the devices. With frequent ids, or a
    placement under which some devices have most of the ids of a batch, they are too large, or hold no batch, so that
    every step takes a second exchange.

    Args:
        table: divided over devices, other than a hash table; its own `Exchange` is not read.
        ids: integers ``[steps * batch, ids per bag]`` or ``[n]``, of all devices; negative ones are padding.
        steps: how many batches they are. Of several batches, the largest counts are taken.
        pooled: ``"rows"`` or ``"sums"``, what comes back for bags.
        dtype: as that of `Exchange`.

    >>> import jax, jax_tt, numpy as np
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> table = jax_tt.tables.ShardedTable(jax_tt.dense_table(1000, 16), mesh, "model", jax_tt.Placement.hashed())
    >>> jax_tt.planning.plan_exchange(table, np.array([[1, 2, 1, 1]])).expected_unique
    0.5
    """
    if not isinstance(table, ShardedTable) or table.ids.takes_keys:
        kind = type(table.table if isinstance(table, ShardedTable) else table).__name__
        raise TypeError(
            f"table: got a {kind}; expected a ShardedTable of rows, e.g. of jax_tt.shard_tables. The keys of hash "
            "tables are spread evenly: expected_unique= is all that they need."
        )
    one_of("pooled", pooled, ("rows", "sums"))
    steps = as_positive("steps", steps)
    sample = sample_of("ids", ids, table.num_embeddings, table.mesh.size, steps)
    unique, most = _of_rows(table, sample)
    share = max(unique, 1) / sample.per_device
    if pooled == "sums":
        even, most = sample.per_device * table.layout.columns, _of_positions(table, sample)
    else:
        even = max(unique, 1) * table.layout.columns
    skew = max(1.0, most * table.layout.devices / even)
    return Exchange(dtype, share, pooled, skew)


def _of_rows(table: ShardedTable, sample: Sample) -> tuple[int, int]:
    """The different rows of the device with most of them, and the most that one device asks of another."""
    part, rows = sample.requests()
    unique = int(np.bincount(part).max(initial=0))
    return unique, _most(table, part, rows)


def _of_positions(table: ShardedTable, sample: Sample) -> int:
    """The most ids that are for one device, with those that are several times in a part of a batch."""
    steps, devices, _ = sample.ids.shape
    parts = np.broadcast_to(np.arange(steps * devices).reshape(steps, devices, 1), sample.ids.shape)
    here = sample.ids >= 0
    return _most(table, parts[here], sample.ids[here])


def _most(table: ShardedTable, part: Any, rows: Any) -> int:
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
    own = places[np.arange(len(places)), turn % (places >= 0).sum(axis=1)] // layout.pool
    return int(np.bincount(part * layout.devices + own).max(initial=0))
