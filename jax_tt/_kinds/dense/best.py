"""The best rows of arrays of rows, from a native scan."""

from __future__ import annotations

import jax

from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._native.rows import RowTable
from jax_tt._native.scan import scan
from jax_tt._table.types import State


@best_rows.register(RowTable)
def best_of_array(table: RowTable, state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        (rows,) = table.spec.params(state)
        asked = queries.vectors, queries.exclude, queries.present, queries.k
        return scan("rows", {"rows": rows}, {}, *asked)

    return best_scanned(table, state, queries, scanned)
