"""`TablePlan`: the choice for every table, and the reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jax_tt._base.arguments import mismatch
from jax_tt._base.progress import text_table
from jax_tt._directories.row_cache import RowCache
from jax_tt._ids.id_order import IdOrder
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._ops.describe import described_tt
from jax_tt._planning.device_plan import DevicePlan
from jax_tt._table.copies import with_name, with_update
from jax_tt._table.table import Table
from jax_tt._tt.shape import TTShape

_COLUMNS = ("table", "choice", "rows", "columns", "ranks", "cache", "bytes", "smaller by", "error")


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedTable:
    """The choice of `plan` for one table.

    Attributes:
        num_embeddings, features: its sizes.
        dtype: storage type.
        kind: ``"dense"``, ``"tensor train"`` or ``"low rank"``, which is a train of two cores, the first with all rows
            and the second with all columns; or a kind of `compress`.
        shape: `TTShape` of the cores; None if it has none.
        id_order: order of the ids for which the error was measured, or None for the given order.
        cache: `RowCache`, or None.
        nbytes: bytes of parameters, order and cache, without optimizer state.
        dense_bytes: bytes of the dense table.
        error: relative Frobenius error.
        measured: whether the error is measured on the trained table or predicted from its sizes.
        reason: the reason for the choice, as text.
        small: the table of a kind of `compress`, or None for other kinds.
        detail: its settings, in words; of a train, whether its ids are ordered.

    >>> import jax_tt
    >>> planned = jax_tt.plan({"items": (1_000_000, 64)}, 4_000_000)["items"]
    >>> planned.kind, planned.measured, planned.nbytes <= 4_000_000
    ('tensor train', False, True)
    >>> sorted(planned.arguments())
    ['cache', 'col_factors', 'features', 'id_order', 'num_embeddings', 'param_dtype', 'row_factors', 'tt_ranks']
    >>> planned.table(update=jax_tt.Update(jax_tt.optimizers.Adagrad(0.05))).num_embeddings
    1000000
    """

    num_embeddings: int
    features: int
    dtype: Any
    kind: str
    shape: TTShape | None
    id_order: IdOrder | None
    cache: RowCache | None
    nbytes: int
    dense_bytes: int
    error: float
    measured: bool
    reason: str
    small: Table | None = None
    detail: str = ""

    def arguments(self) -> dict[str, Any]:
        """Arguments for `TTEmbed` and `TTEmbedBag`, or for `EmbedBag` if dense.

        Raises:
            TypeError: it is of a kind of `compress`, for which `table` is.
        """
        if self.small is not None:
            got = f"a planned table of the kind {self.kind}"
            raise mismatch("arguments", got, "one with cores or dense", "Use table().", TypeError)
        if self.shape is None:
            sizes = {"num_embeddings": self.num_embeddings, "features": self.features}
            return {**sizes, "param_dtype": self.dtype}
        wrappers = {"cache": self.cache, "id_order": self.id_order}
        return {**self.shape.layer_arguments(), **wrappers, "param_dtype": self.dtype}

    def table(self, **fields: Any) -> Table:
        """The table, for `TableEmbedBag` and `lookup_bags`.

        Args:
            **fields: other fields of `DenseTable` and `TTTable`: ``update``, ``name``.
        """
        if self.small is not None:
            small = with_update(self.small, fields.pop("update", None))
            return with_name(small, fields.pop("name", None), **fields)
        fields["param_dtype"] = self.dtype
        if self.shape is None:
            return DenseTable(self.num_embeddings, self.features, **fields)
        return described_tt(self.shape, self.cache, self.id_order, **fields)


@dataclasses.dataclass(frozen=True, eq=False)
class TablePlan(Mapping[str, PlannedTable]):
    """Tables within a budget, made by `plan`: a mapping from names to `PlannedTable`, which ``print`` shows as a table.

    Attributes:
        tables: name -> `PlannedTable`.
        budget_bytes: the budget.
        placements: `DevicePlan`, if the tables are planned for several devices.

    >>> import jax_tt
    >>> plan = jax_tt.plan({"items": (1_000_000, 64), "days": (7, 16)}, 4_000_000)
    >>> plan.nbytes <= plan.budget_bytes, [planned.kind for planned in plan.values()]
    (True, ['tensor train', 'dense'])
    """

    tables: Mapping[str, PlannedTable]
    budget_bytes: int
    placements: DevicePlan | None = None

    def __getitem__(self, name: str) -> PlannedTable:
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables together."""
        return sum(planned.nbytes for planned in self.values())

    def __str__(self) -> str:
        lines = [(name, *_cells(planned)) for name, planned in self.items()]
        heading, *body = text_table(_COLUMNS, lines, left=2).split("\n")
        reasons = [planned.reason for planned in self.values()]
        explained = [f"{line}  {why}" for line, why in zip(body, reasons, strict=True)]
        dense = sum(planned.dense_bytes for planned in self.values())
        total = (
            f"{self.nbytes:,} of {self.budget_bytes:,} bytes; dense tables would take {dense:,}. Errors with ~ are "
            "predicted from the sizes, the others measured."
        )
        placed = [] if self.placements is None else ["", str(self.placements)]
        return "\n".join([f"{heading}  reason", *explained, total, *placed])


def _cells(planned: PlannedTable) -> tuple[str, ...]:
    kind = f"{planned.kind}, {planned.detail}" if planned.detail else planned.kind
    exact = planned.measured or planned.shape is None
    return (
        kind,
        f"{planned.num_embeddings:,}",
        f"{planned.features:,}",
        "" if planned.shape is None else " ".join(map(str, planned.shape.ranks)),
        "" if planned.cache is None else f"{planned.cache.capacity:,}",
        f"{planned.nbytes:,}",
        f"{4 * planned.num_embeddings * planned.features / planned.nbytes:,.1f}x",
        f"{'' if exact else '~'}{planned.error:.3g}",
    )
