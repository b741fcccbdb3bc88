"""The best rows of quantized tables, from a native scan."""

from __future__ import annotations

import jax
from jax import lax

from jax_tt._kinds.quantized.table import PACKED, QuantizedTable
from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._native.scan import scan
from jax_tt._table.rotation import rotation_of, turned_back
from jax_tt._table.types import State


@best_rows.register(QuantizedTable)
def best_of_packed(
    table: QuantizedTable, state: State, queries: Queries
) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        # A query that is turned has the same product with a row as the query with the turned row.
        rotation = rotation_of(table, state)
        vectors = turned_back(queries.vectors, rotation, lax.Precision.HIGHEST)
        asked = vectors, queries.exclude, queries.present, queries.k
        return scan("rows", {"rows": state[PACKED]}, table.row_attributes, *asked)

    return best_scanned(table, state, queries, scanned)
