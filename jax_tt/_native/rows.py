"""`RowTable`: an array of rows, with native ops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_positive
from jax_tt._base.dtypes import accumulator
from jax_tt._base.storage import check_param_dtype
from jax_tt._ids.batch import Batch
from jax_tt._jax.rounding import gathered
from jax_tt._native.dense import DENSE
from jax_tt._native.table_call import Calls
from jax_tt._native.table_group import NativeTable
from jax_tt._table import distinct_rows
from jax_tt._table.options import Lookup, Update, check_update
from jax_tt._table.state import Params, SlotArrays, State, StateSpec, parameter
from jax_tt._table.whole import to_dense


@dataclasses.dataclass(frozen=True)
class RowTable(NativeTable):
    """Rows that other code provides, one parameter ``embedding[num_embeddings, features]``.

    It has the fields of a `DenseTable`, which adds initial values; lookups in both share native calls.
    """

    num_embeddings: int
    features: int
    param_dtype: Any = jnp.float32
    update: Update | None = None
    name: str | None = None
    calls: ClassVar[Calls] = DENSE

    def __post_init__(self) -> None:
        check_param_dtype(self.param_dtype)
        check_update(self.update)
        as_positive("num_embeddings", self.num_embeddings)
        as_positive("features", self.features)
        if self.update is not None:
            self.update.optimizer.check_width(self.features)

    @functools.cached_property
    def spec(self) -> StateSpec:
        rows = parameter("embedding", (self.num_embeddings, self.features), by_row=True)
        return StateSpec.of([rows], self.update)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        """Zeros, to be replaced by rows."""
        del key
        return {"embedding": jnp.zeros((self.num_embeddings, self.features), self.param_dtype)}

    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        del precision
        (table,), (ids,) = params, digits
        return gathered(table, ids)

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, SlotArrays, jax.Array, jax.Array | None]:
        if not self.steps_natively:
            return distinct_rows.update(self, state, batch, residuals, g, lookup, values)
        return super().stepped_params(state, batch, residuals, g, lookup, values)


@to_dense.register(RowTable)
def array_of(table: RowTable, state: State) -> jax.Array:
    (rows,) = table.spec.params(state)
    return rows.astype(accumulator(rows.dtype))
