"""`OrderedTable`: a table whose rows are in another order than the ids."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jax_tt._base.arguments import instance_of, mismatch
from jax_tt._ids.batch import Batch
from jax_tt._ids.id_order import ID_ORDER, IdOrder, columns_by_id, mapped_ids
from jax_tt._ids.id_space import IdSpace
from jax_tt._ids.stored_order import StoredRows, kept_bytes, on_device, rows_of_layer
from jax_tt._table.options import Lookup
from jax_tt._table.state import Array, State, StateSpec
from jax_tt._table.whole import attend, to_dense
from jax_tt._table.wrapper import Wrapper

_INTEGERS_ONLY = (
    "a table with an id_order, which maps integers. Map them on the host first, shape.split_ids(order.apply(ids)), and "
    "build the layer with id_order=None."
)


@dataclasses.dataclass(frozen=True)
class OrderedTable(Wrapper):
    """A table with an order of ids, which is part of the state.

    Attributes:
        table: the table, with or without a row cache.
        id_order: `IdOrder` of an initial state; may be None if no state is initialised.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> order = jax_tt.order.from_counts([1, 5, 3])
    >>> table = jax_tt.tables.OrderedTable(jax_tt.tables.DenseTable(3, 8), order)
    >>> state = table.init(jax.random.key(0))
    >>> rows, _ = jax_tt.lookup(table, state, jnp.array([0]))
    >>> bool((rows[0] == state["embedding"][2]).all())
    True
    """

    id_order: IdOrder | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if ID_ORDER in self.table.spec.buffers:
            got = "one that has an order of ids"
            fix = "Compose the two orders: IdOrder(inner.rows[outer.rows])."
            raise mismatch("table", got, "one without", fix, error=TypeError)
        if self.table.ids.takes_keys:
            got = "a HashTable, whose ids are keys without an order"
            expected = "the order inside, HashTable(OrderedTable(table, id_order))"
            raise mismatch("table", got, expected, error=TypeError)
        check_id_order(self.id_order, self.num_embeddings)

    @functools.cached_property
    def spec(self) -> StateSpec:
        return self.table.spec.without_rows().extended(
            Array(ID_ORDER, "buffer", collection=ID_ORDER)
        )

    @functools.cached_property
    def ids(self) -> IdSpace:
        # Ids are mapped as integers, independent of the digits of the rows.
        return dataclasses.replace(
            self.table.ids, radices=(self.num_embeddings,), integers_only=_INTEGERS_ONLY
        )

    @functools.cached_property
    def _nbytes(self) -> tuple[int, int]:
        # Also without the order, which an initial state needs.
        of_lookups, of_steps = self.table._nbytes
        return of_lookups + kept_bytes(self.num_embeddings), of_steps

    def init_rest(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        if self.id_order is None:
            raise mismatch(f"{self.ids.label}id_order", "None", "the order of a fresh state")
        return {**self.table.init_rest(params), ID_ORDER: on_device(self.id_order.rows)}

    def prepare(self, state: State, batch: Batch, lookup: Lookup) -> tuple[State, Batch]:
        ids = mapped_ids(self._rows(state), batch.ids, f"{self.ids.label}ids")
        return self.table.prepare(state, dataclasses.replace(batch, ids=ids), lookup)

    def _rows(self, state: State) -> StoredRows:
        return rows_of_layer(state[ID_ORDER], self.num_embeddings)


@to_dense.register(OrderedTable)
def rows_by_id(table: OrderedTable, state: State) -> jax.Array:
    return to_dense(table.table, state)[table._rows(state).whole()]


@attend.register(OrderedTable)
def attend_by_id(table: OrderedTable, state: State, query: jax.Array, precision: Any) -> jax.Array:
    return columns_by_id(table._rows(state), attend(table.table, state, query, precision))


def check_id_order(id_order: Any, num_embeddings: int) -> None:
    """Raises unless the argument is None or an `IdOrder` of this number of ids."""
    if id_order is None:
        return
    expected = "None or a jax_tt.order.IdOrder, e.g. jax_tt.order.from_counts(counts)"
    order: IdOrder = instance_of("id_order", id_order, IdOrder, expected)
    if order.num_embeddings != num_embeddings:
        got = f"an order of {order.num_embeddings} ids for a table of {num_embeddings} rows"
        raise mismatch("id_order", got, "one that is made with the layer's tt_shape")
