"""`DenseTable`: an uncompressed table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_array, as_positive
from jax_tt._base.dtypes import accumulator
from jax_tt._base.storage import (
    MAX_COLUMNS,
    check_param_dtype,
    check_storage,
    refuse_tables,
    table_label,
)
from jax_tt._ids.batch import Batch
from jax_tt._jax.gather import gathered
from jax_tt._native.dense import DENSE
from jax_tt._native.native import NativeTable
from jax_tt._native.table_call import Calls
from jax_tt._table import distinct_rows
from jax_tt._table.initial_rows import default_embedding_init
from jax_tt._table.options import Lookup, Update, check_update
from jax_tt._table.types import Params, Slots, State


@dataclasses.dataclass(frozen=True, eq=False)
class GivenRows:
    """In place of an initialiser, the rows."""

    rows: Any

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Returns a copy of the rows."""
        del key, shape
        return jnp.array(self.rows, dtype)


@dataclasses.dataclass(frozen=True)
class DenseTable(NativeTable):
    """A dense table, one parameter ``embedding[num_embeddings, features]``.

    Attributes:
        num_embeddings, features: its sizes.
        param_dtype: type of the parameter.
        update: `Update` of a fused table, or None.
        name: for error messages.
        embedding_init: initialiser ``(key, shape, dtype) -> table``.

    >>> import jax, jax_tt
    >>> jax_tt.DenseTable(1000, 16).init(jax.random.key(0))["embedding"].shape
    (1000, 16)
    """

    num_embeddings: int
    features: int
    param_dtype: Any = jnp.float32
    update: Update | None = None
    name: str | None = None
    embedding_init: Callable[..., Any] = default_embedding_init
    calls: ClassVar[Calls] = DENSE
    row_names: ClassVar[tuple[str, ...]] = ("embedding",)

    def __post_init__(self) -> None:
        check_param_dtype(self.param_dtype)
        check_update(self.update)
        as_positive("num_embeddings", self.num_embeddings)
        as_positive("features", self.features)
        if self.update is not None:
            self.update.optimizer.check_width(self.features)

    def without_values(self) -> DenseTable:
        # An initialiser may keep a reference to the table that it returns.
        return dataclasses.replace(self, embedding_init=default_embedding_init)

    @classmethod
    def of(
        cls,
        table: Any,
        update: Update | None = None,
        name: str | None = None,
        argument: str = "table",
    ) -> tuple[DenseTable, jax.Array]:
        """Checks an array, passed as ``argument``; returns its description and the JAX array."""
        label = table_label(name)
        refuse_tables(table, f"{label}{argument}", ".cores[0]")
        table = as_array(f"{label}{argument}", table)
        shape = tuple(table.shape)
        if len(shape) != 2 or 0 in shape or shape[1] > MAX_COLUMNS:
            raise ValueError(
                f"{label}{argument}: got shape {shape}; expected [num_embeddings, features], none 0, and fewer than "
                "2**31 features."
            )
        check_storage(label, argument, {str(table.dtype)})
        return cls(*shape, param_dtype=table.dtype, update=update, name=name), jnp.asarray(table)

    @property
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"embedding": (self.num_embeddings, self.features)}

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        shape = (self.num_embeddings, self.features)
        return {"embedding": self.embedding_init(key, shape, self.param_dtype)}

    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        del precision
        (table,), (ids,) = params, digits
        return gathered(table, ids)

    def stepped_params(
        self, state: State, batch: Batch, residuals: Any, g: jax.Array, lookup: Lookup, values: Any
    ) -> tuple[Params, Slots, jax.Array, jax.Array | None]:
        if not self.steps_natively:
            return distinct_rows.update(self, state, batch, residuals, g, lookup, values)
        return super().stepped_params(state, batch, residuals, g, lookup, values)

    def to_dense(self, state: State) -> jax.Array:
        (table,) = self.params(state)
        return table.astype(accumulator(table.dtype))
