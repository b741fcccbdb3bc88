"""`DenseTable`: an uncompressed table that makes its initial values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_array, mismatch
from jax_tt._base.storage import MAX_COLUMNS, check_storage, table_label
from jax_tt._ids.id_space import IdSpace
from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._native.rows import RowTable
from jax_tt._native.scan import scan
from jax_tt._table.copies import without_values
from jax_tt._table.initial_rows import check_initializer, default_embedding_init
from jax_tt._table.options import Update
from jax_tt._table.state import State
from jax_tt._table.whole import RowSlices, row_slices


@dataclasses.dataclass(frozen=True, eq=False)
class GivenRows:
    """In place of an initialiser, the rows."""

    rows: Any

    def __call__(self, key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Returns a copy of the rows."""
        del key, shape
        return jnp.array(self.rows, dtype)


@dataclasses.dataclass(frozen=True)
class DenseTable(RowTable):
    """A dense table, one parameter ``embedding[num_embeddings, features]``.

    Attributes:
        num_embeddings, features: shape of the parameter.
        param_dtype: type of the parameter.
        update: `Update` of a fused table, or None.
        name: for error messages.
        embedding_init: initialiser ``(key, shape, dtype) -> table``.
        takes_slots: whether it is a table with tiers, which takes `pipeline.Slots` in place of ids, and nothing else.

    >>> import jax, jax_tt
    >>> jax_tt.tables.DenseTable(1000, 16).init(jax.random.key(0))["embedding"].shape
    (1000, 16)
    """

    embedding_init: Callable[..., Any] = default_embedding_init
    takes_slots: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_initializer(self.ids.label, "embedding_init", self.embedding_init)
        object.__setattr__(self, "takes_slots", bool(self.takes_slots))

    @functools.cached_property
    def ids(self) -> IdSpace:
        rows = self.num_embeddings
        return IdSpace(rows, (rows,), takes_slots=bool(self.takes_slots), name=self.name)

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
        table = as_array(f"{label}{argument}", table)
        shape = tuple(table.shape)
        if len(shape) != 2 or 0 in shape or shape[1] > MAX_COLUMNS:
            expected = "[num_embeddings, features], none 0, and fewer than 2**31 features"
            raise mismatch(f"{label}{argument}", f"shape {shape}", expected)
        check_storage(label, argument, {str(table.dtype)})
        return cls(*shape, param_dtype=table.dtype, update=update, name=name), jnp.asarray(table)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        shape = (self.num_embeddings, self.features)
        return {"embedding": self.embedding_init(key, shape, self.param_dtype)}


@row_slices.register(DenseTable)
def dense_slices(table: DenseTable) -> RowSlices:
    del table
    return RowSlices("embedding", 1, lambda params: params["embedding"])


@without_values.register(DenseTable)
def without_initial_rows(table: DenseTable) -> DenseTable:
    given = isinstance(table.embedding_init, GivenRows)
    return dataclasses.replace(table, embedding_init=default_embedding_init) if given else table


@best_rows.register(RowTable)
def best_of_array(table: RowTable, state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        (rows,) = table.spec.params(state)
        asked = queries.vectors, queries.exclude, queries.present, queries.k
        return scan("rows", {"rows": rows}, {}, *asked)

    return best_scanned(table, state, queries, scanned)
