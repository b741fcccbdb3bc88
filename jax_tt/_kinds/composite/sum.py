"""`SumTable`: a table whose rows are sums of rows of other tables."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._ids.batch import Batch, is_padding
from jax_tt._kinds.composite.composite import Composite
from jax_tt._table.copies import with_default_stddev
from jax_tt._table.options import Lookup
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._table.whole import attend, to_dense


@dataclasses.dataclass(frozen=True)
class SumTable(Composite):
    """A table whose rows are the sums of the rows of several tables.

    An example is a sum of tensor trains that have different orders of ids, as `tt.residuals` makes it. Where native
    operations take many tables of a kind in one call, the tables of a sum are one call.

    Its state has the arrays of table k with the prefix ``table_k_``. With an update, which is the same for all tables,
    every table is stepped with the gradient of the sum, which has one step count and one sentinel. With
    ``skip_nonfinite``, a table whose gradients are not finite is left unchanged.

    Attributes:
        tables: at least one, of the same sizes and with the same update. They may have orders of ids, but no row
            caches, and are not hash tables.
        name: for error messages.

    Raises:
        ValueError, TypeError: the tables do not fit together; the message names the first that does not.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> train = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(1000, 16, ranks=4))
    >>> order = jax_tt.order.from_counts(range(1000))
    >>> table = jax_tt.tables.SumTable((train, jax_tt.tables.OrderedTable(train, order)))
    >>> state = table.init(jax.random.key(0))
    >>> rows, _ = jax_tt.lookup(table, state, jnp.array([1, 999]))
    >>> rows.shape, sorted(state)[:2]
    ((2, 16), ['table_0_core_0', 'table_0_core_1'])
    """

    @property
    def num_embeddings(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.tables[0].num_embeddings

    def common(self, table: Table) -> str:
        return f"{table.num_embeddings} x {table.features}"

    def batches(self, state: State, batch: Batch, lookup: Lookup) -> list[Batch]:
        del state
        if lookup.bounds == "clip":
            # Before orders, so that all tables read the row of the same id.
            dtype = batch.ids.dtype
            last = np.asarray(min(self.num_embeddings - 1, jnp.iinfo(dtype).max), dtype)
            inside = jnp.clip(batch.ids, 0, jnp.asarray(last))
            ids = jnp.where(is_padding(batch), batch.ids, inside) if batch.padded else inside
            batch = dataclasses.replace(batch, ids=ids)
        return [batch] * len(self.tables)


@with_default_stddev.register(SumTable)
def with_default_stddev_of_sum(table: SumTable, stddev: float) -> SumTable:
    of_each = stddev / math.sqrt(len(table.tables))
    return table.of_each(lambda member: with_default_stddev(member, of_each))


@to_dense.register(SumTable)
def dense_sum(table: SumTable, state: State) -> jax.Array:
    return _added(table.of_members(state, to_dense))


@attend.register(SumTable)
def attend_sum(table: SumTable, state: State, query: jax.Array, precision: Any) -> jax.Array:
    return _added(table.of_members(state, attend, query, precision))


def _added(arrays: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(lax.add, arrays)
