"""`DevicePlan`: placements of tables, and their predicted cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jax_tt._base.progress import text_table
from jax_tt._ids.placement import Layout, Placement
from jax_tt._planning.bandwidths import Bandwidths
from jax_tt._planning.load import Load
from jax_tt._planning.traced_exchange import ExchangeBytes
from jax_tt._table.table import Table

_COLUMNS = (
    "table",
    "placement",
    "rows",
    "columns",
    "bytes a device",
    "ids",
    "rows read",
    "by the busiest",
    "rounds",
)


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedTable:
    """A table of a `DevicePlan`.

    Attributes:
        table: before it is sharded.
        placement: chosen; None for a replicated table, outside of the exchange.
        device_bytes: bytes of a device, with optimizer state.
        ids: number of ids that a device looks up in a step.
        load: rows that every device reads and steps for the sample; None without a placement.

    >>> import jax_tt
    >>> plan = jax_tt.planning.plan_placements({"ad": jax_tt.dense_table(1000, 8)}, 4)
    >>> plan.tables["ad"].layout(4).rows, plan.tables["ad"].ids
    (250, 256)
    """

    table: Table
    placement: Placement | None
    device_bytes: int
    ids: int
    load: Load | None

    def layout(self, devices: int) -> Layout:
        """Where the pages are."""
        placement = Placement.replicated() if self.placement is None else self.placement
        return placement.layout(self.table.num_embeddings, devices)


@dataclasses.dataclass(frozen=True, eq=False)
class DevicePlan(Mapping[str, Placement]):
    """Placements of tables, made by `plan_placements`, which ``print`` shows as a table.

    It is a mapping from the names of the sharded tables to their `Placement`, for `EmbedCollection` and `shard_tables`.

    Attributes:
        tables: name -> `PlacedTable`, all tables.
        devices: the number of devices.
        exchange: bytes of the collectives of a step; None if no table is sharded.
        busy: seconds that every device reads, steps and routes rows, ``[devices]``.
        bandwidths: constants of the model.

    >>> import jax_tt
    >>> plan = jax_tt.planning.plan_placements({"ad": jax_tt.dense_table(1000, 8)}, 4)
    >>> dict(plan)
    {'ad': Placement(kind='hashed', page_size=None, devices=())}
    >>> plan.forward_bytes, plan.backward_bytes
    (13828, 12288)
    """

    tables: Mapping[str, PlacedTable]
    devices: int
    exchange: ExchangeBytes | None
    busy: tuple[float, ...]
    bandwidths: Bandwidths

    def __getitem__(self, name: str) -> Placement:
        placement = self.tables[name].placement
        if placement is None:
            raise KeyError(name)
        return placement

    def __iter__(self) -> Iterator[str]:
        return (name for name, placed in self.tables.items() if placed.placement is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def table_bytes(self) -> int:
        """Bytes of a device for tables and optimizer state. All pools of a table have the same size."""
        return sum(placed.device_bytes for placed in self.tables.values())

    @property
    def device_bytes(self) -> int:
        """`table_bytes`, and the bytes of messages, sent and received."""
        return self.table_bytes + 2 * (self.forward_bytes + self.backward_bytes)

    @property
    def rounds(self) -> int:
        """Rounds of the exchange for the sample: 1, or a power of two if the messages of a table are too small.

        If they are for a table whose sums travel, one more, after which rows travel.
        """
        loads = {
            name: placed.load for name, placed in self.tables.items() if placed.load is not None
        }
        summed = frozenset() if self.exchange is None else self.exchange.summed
        again = not all(load.fits for name, load in loads.items() if name in summed)
        rounds = [load.rounds for name, load in loads.items() if again or name not in summed]
        return again + max(rounds, default=1)

    @property
    def forward_bytes(self) -> int:
        """Bytes of the operands of collectives of a device in a forward pass, in all rounds."""
        return 0 if self.exchange is None else self._of_rounds(self.exchange.forward)

    @property
    def backward_bytes(self) -> int:
        """Bytes of the operands of collectives of a device in a backward pass, in all rounds."""
        return 0 if self.exchange is None else self._of_rounds(self.exchange.backward)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Expected time of a step of tables on every device, ``[devices]``."""
        if self.exchange is None:
            return self.busy
        messages = self.exchange.collectives * self.rounds * (self.devices - 1)
        sent = (self.forward_bytes + self.backward_bytes) * (self.devices - 1) / self.devices
        travel = messages * self.bandwidths.message_seconds + sent / self.bandwidths.exchange
        return tuple(seconds + travel for seconds in self.busy)

    @property
    def slowest(self) -> int:
        """The device that takes the most time."""
        return max(range(self.devices), key=lambda device: self.seconds[device])

    def __str__(self) -> str:
        lines = [(name, *self._cells(placed)) for name, placed in self.tables.items()]
        seconds, slowest = self.seconds, self.slowest
        mean = sum(seconds) / self.devices
        words = (
            f"Each of {self.devices:,} devices: {self.table_bytes:,} bytes of tables, {self.device_bytes:,} with "
            f"messages; sends {self.forward_bytes:,} bytes forward and {self.backward_bytes:,} backward in a step.",
            f"Expected time of the tables in a step: {1e3 * seconds[slowest]:.3g} ms on device {slowest}, the slowest, "
            f"and {1e3 * mean:.3g} ms on average (constants: {self.bandwidths.machine}).",
        )
        return "\n".join([text_table(_COLUMNS, lines, left=2), *words])

    def _of_rounds(self, first: int) -> int:
        """Other rounds exchange what the first one does, and row numbers with gradients, which are few bytes."""
        return first * self.rounds

    def _cells(self, placed: PlacedTable) -> tuple[str, ...]:
        load = placed.load
        return (
            _words(placed),
            f"{placed.table.num_embeddings:,}",
            f"{placed.table.features:,}",
            f"{placed.device_bytes:,}",
            f"{placed.ids:,}",
            "" if load is None else f"{load.read.mean():,.0f}",
            "" if load is None else f"{load.read.max():,.0f}",
            "" if load is None else f"{load.rounds}",
        )


def _words(placed: PlacedTable) -> str:
    placement = placed.placement
    if placement is None:
        return "on every device"
    if placement.kind == "on":
        return f"on({placement.devices[0][0]})"
    if placement.kind != "pages":
        return f"{placement.kind}()"
    copies = sum(len(devices) > 1 for devices in placement.devices)
    return f"{len(placement.devices):,} pages" + (f", {copies:,} with replicas" if copies else "")
