"""The best rows of coded tables, from a native scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._kinds.coded.layout import CODEBOOKS
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._native.scan import scan
from jax_tt._table.rotation import rotation_of, turned_back
from jax_tt._table.types import State


@best_rows.register(CodedTable)
def best_of_codes(table: CodedTable, state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        books = table.codebook_rows(state).astype(jnp.float32)
        vectors = turned_back(queries.vectors, rotation_of(table, state), lax.Precision.HIGHEST)
        asked = vectors, queries.exclude, queries.present, queries.k
        arrays = {**table.code_operands(state), CODEBOOKS: books}
        return scan("coded", arrays, table.row_attributes, *asked)

    return best_scanned(table, state, queries, scanned)
