"""`plan_placements`: chooses the devices of the rows of tables."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jax_tt._base.arguments import as_int, as_positive, instance_of, mismatch
from jax_tt._ids.placement import Layout, Placement
from jax_tt._planning.bandwidths import Bandwidths
from jax_tt._planning.device_plan import DevicePlan, PlacedTable
from jax_tt._planning.load import Load, Sample, load_of, pages_of, sample_of, uniform_sample
from jax_tt._planning.traced_exchange import traced_exchange
from jax_tt._table.sharding import can_be_placed, can_be_sharded
from jax_tt._table.table import Table

# Pages of a device that are placed by their load.
_PAGES = 16
_MOST_PAGES = 2**16
# A placement has to be so much faster than a simpler one.
_FASTER = 0.98


def plan_placements(
    tables: Mapping[str, Table],
    devices: int,
    id_samples: Mapping[str, Any] | None = None,
    *,
    steps: int = 1,
    device_bytes: int | None = None,
    bandwidths: Bandwidths | None = None,
) -> DevicePlan:
    """Chooses the `Placement` of every table, and predicts memory, messages and time of a step.

    `plan` with ``devices=`` does this for tables that it has chosen, as tensor trains or dense tables.

    Tables are placed one after the other, in descending order of their bytes per step. Each gets the placement with
    which the step takes the least time, of `Placement.hashed`, `round_robin`, `contiguous`, `on` the device with the
    least load, `replicated`, and `pages` that are dealt out by their load, hot ones to several devices. The first in
    this order is kept unless another is faster by 2 %. A placement is only considered if the others still fit.

    The time of a step on a device is

        collectives * (devices - 1) * message_seconds + bytes sent / exchange
        + bytes of rows read / gather + bytes of rows stepped / update + ids / route

    where the first two count all rounds of the exchange, and rows are counted in the sample. The bytes in the result
    are read off the traced program of such a step, with `Bags` of the length of the sample and equal parts of
    the batch on all devices. Messages have a fixed size, which depends on the number of ids and not on their values.

    Args:
        tables: by name. Tables that cannot be sharded, such as tensor trains, are replicated.
        devices: number of devices of the mesh axis to shard tables over. They need not exist.
        id_samples: name -> integers ``[steps * batch, ids per bag]`` or ``[steps * batch]``, the ids of whole batches
            of all devices; negative ones are padding. A placement by load is made from the first half of the steps and
            judged by the others. Without a sample of a table, 1,024 random ids are assumed.
        steps: of the samples.
        device_bytes: memory of a device for tables, optimizer state and messages; default: no limit.
        bandwidths: constants of the model; default: round numbers.

    Returns:
        `DevicePlan`, which can be used as the ``placement`` of `EmbedCollection` and `shard_tables`.

    Raises:
        ValueError: the tables do not fit on the devices, or an argument is invalid.
        TypeError: an argument has another type.

    >>> import jax_tt, numpy as np
    >>> rule = jax_tt.optimizers.RowWiseAdagrad(0.05)
    >>> tables = {"user": jax_tt.dense_table(10**6, 64, optimizer=rule), "day": jax_tt.dense_table(7, 8)}
    >>> ids = {"user": np.random.default_rng(0).integers(0, 10**6, (512, 4))}
    >>> plan = jax_tt.planning.plan_placements(tables, 8, ids)
    >>> plan["user"].kind, plan.tables["user"].device_bytes // 10**6
    ('hashed', 32)
    """
    if not isinstance(tables, Mapping) or not tables:
        raise TypeError(f"tables: got {tables!r}; expected a mapping from names to tables.")
    for name, table in tables.items():
        expected = "a jax_tt.Table, e.g. jax_tt.dense_table(1000, 16)"
        instance_of(f"tables[{name!r}]", table, Table, expected)
    devices, steps = as_positive("devices", devices), as_positive("steps", steps)
    limit = None if device_bytes is None else as_int("device_bytes", device_bytes)
    bandwidths = Bandwidths() if bandwidths is None else bandwidths
    given = dict(id_samples or {})
    if unknown := sorted(set(given) - set(tables)):
        raise ValueError(f"id_samples: got {unknown[0]!r}; expected names of tables.")
    costs = {}
    for name, table in tables.items():
        rows = table.num_embeddings
        sample = (
            sample_of(f"id_samples[{name!r}]", given[name], rows, devices, steps)
            if name in given
            else uniform_sample(rows, devices)
        )
        costs[name] = _Costs(table, sample, bandwidths)
    chosen = _chosen(costs, devices, limit)
    return _plan(costs, chosen, devices, limit, bandwidths)


class _Costs:
    """The costs of placements of a table.

    Attributes:
        table: before it is sharded.
        sample: of its ids.
        per_row: bytes of a row with its optimizer state.
        fixed: bytes of the rest of its state, on every device.
    """

    def __init__(self, table: Table, sample: Sample, bandwidths: Bandwidths):
        self.table, self.sample, self.bandwidths = table, sample, bandwidths
        state = jax.eval_shape(table.init, jax.random.key(0))
        sizes = {name: like.size * like.dtype.itemsize for name, like in state.items() if like.size}
        rows = table.spec.row_arrays if can_be_placed(table) else {}
        self.per_row = sum(sizes[name] for name in rows) // table.num_embeddings
        self.fixed = sum(nbytes for name, nbytes in sizes.items() if name not in rows)
        self.width = table.features * 4
        self.layout = functools.cache(self._layout)
        self.load = functools.cache(self._load)

    @property
    def devices(self) -> int:
        return self.sample.ids.shape[1]

    def nbytes(self, placement: Placement | None) -> int:
        """Bytes of a device."""
        if placement is None:
            return self.fixed // self.devices if can_be_sharded(self.table) else self.fixed
        layout = self.layout(placement)
        return self.fixed + layout.rows * self.per_row + len(layout.places)

    def _load(self, placement: Placement) -> Load:
        return load_of(self.sample.parts()[1], self.layout(placement))

    def _layout(self, placement: Placement) -> Layout:
        return placement.layout(self.table.num_embeddings, self.devices)

    def busy(self, load: Load) -> np.ndarray[Any, Any]:
        """Seconds of every device for rows, ``[devices]``."""
        read, stepped = load.read * self.width, load.stepped * self.per_row
        return read / self.bandwidths.gather + stepped / self.bandwidths.update

    def travel(self, load: Load) -> float:
        """Seconds of a round for messages, as in `traced_exchange`, but only to compare placements."""
        return sum(load.sent) * self.width / self.bandwidths.exchange

    def candidates(self, idlest: int) -> Iterator[Placement]:
        yield Placement.hashed()
        yield Placement.round_robin()
        yield Placement.contiguous()
        if self.table.num_embeddings < 2**31:  # rows of a device
            yield Placement.on(idlest)
            yield Placement.replicated()
        made_from, judged_by = self.sample.parts()
        if made_from is not judged_by:
            yield from _by_load(made_from, self.table.num_embeddings)


def _chosen(
    costs: Mapping[str, _Costs], devices: int, limit: int | None
) -> dict[str, Placement | None]:
    sharded = {name: one for name, one in costs.items() if can_be_placed(one.table)}
    smallest = {name: one.nbytes(Placement.hashed()) for name, one in sharded.items()}
    needed = sum(one.fixed for name, one in costs.items() if name not in sharded)
    needed += sum(smallest.values())
    if limit is not None and needed > limit:
        expected = f"at least {needed:,} bytes, as the tables together need that much on each of {devices} devices"
        fix = "Use more devices, or smaller tables (jax_tt.plan)."
        raise mismatch("device_bytes", f"{limit:,} bytes", expected, fix)
    busy, rounds, travel = np.zeros(devices), 1, 0.0
    chosen: dict[str, Placement | None] = dict.fromkeys(costs)
    by_bytes = sorted(
        sharded, key=lambda name: -sharded[name].sample.per_device * sharded[name].width
    )
    for name in by_bytes:
        one = sharded[name]
        best: tuple[float, Placement, Load, int] | None = None
        for placement in one.candidates(int(busy.argmin())):
            nbytes = needed - smallest[name] + one.nbytes(placement)
            if limit is not None and nbytes > limit:
                continue
            load = one.load(placement)
            seconds = float((busy + one.busy(load)).max())
            seconds += (travel + one.travel(load)) * max(rounds, load.rounds)
            if best is None or seconds < best[0] * _FASTER:
                best = seconds, placement, load, nbytes
        assert best is not None  # hashed fits
        _, chosen[name], load, needed = best
        busy, rounds = busy + one.busy(load), max(rounds, load.rounds)
        travel += one.travel(load)
    return chosen


def _plan(
    costs: Mapping[str, _Costs],
    chosen: Mapping[str, Placement | None],
    devices: int,
    limit: int | None,
    bandwidths: Bandwidths,
) -> DevicePlan:
    tables, traced = {}, {}
    for name, one in costs.items():
        placement = chosen[name]
        load = None if placement is None else one.load(placement)
        bags = one.sample.per_device // one.sample.length
        ids = one.sample.per_device
        tables[name] = PlacedTable(one.table, placement, one.nbytes(placement), ids, load)
        if placement is not None:
            traced[name] = one.table, placement, (bags, one.sample.length)
    busy = sum(
        (one.busy(load) for name, one in costs.items() if (load := tables[name].load) is not None),
        np.zeros(devices),
    )
    busy = busy + sum(table.ids for table in tables.values() if table.load) / bandwidths.route
    exchange = traced_exchange(traced, devices) if traced else None
    plan = DevicePlan(tables, devices, exchange, tuple(busy.tolist()), bandwidths)
    if limit is not None and plan.device_bytes > limit:
        messages = f"of which messages take {plan.device_bytes - plan.table_bytes:,} bytes"
        expected = f"at least {plan.device_bytes:,} bytes, {messages}"
        fix = "Use more devices, or smaller batches."
        raise mismatch("device_bytes", f"{limit:,} bytes", expected, fix)
    return plan


def _by_load(sample: Sample, num_embeddings: int) -> Iterator[Placement]:
    """Pages dealt out to the devices by the requests of a sample; pages with too many go to several devices."""
    devices = sample.ids.shape[1]
    count = min(_MOST_PAGES, _PAGES * devices, num_embeddings)
    size = -(-num_embeddings // count)
    count = -(-num_embeddings // size)
    if count <= devices:
        return
    layout = Placement.round_robin(size).layout(num_embeddings, devices)
    _, rows = sample.requests()
    requests = np.bincount(pages_of(layout, rows)[0], minlength=count)
    # A page is on as many devices as keep its share of the requests below half of an average device's.
    half = max(requests.sum() / devices / 2, 1)
    copies = np.clip(np.ceil(requests / half), 1, devices).astype(int)
    room = -(-int(copies.sum()) // devices)
    owners: list[tuple[int, ...]] = [()] * count
    idle = [(0.0, 0, device) for device in range(devices)]
    for page in np.argsort(-requests / copies, kind="stable").tolist():
        taken = [heapq.heappop(idle) for _ in range(min(int(copies[page]), len(idle)))]
        owners[page] = tuple(device for _, _, device in taken)
        for load, pages, device in taken:
            if pages + 1 < room:
                share = float(requests[page]) / len(taken)
                heapq.heappush(idle, (load + share, pages + 1, device))
    yield Placement.pages(owners, size)
