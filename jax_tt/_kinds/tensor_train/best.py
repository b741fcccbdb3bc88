"""The best rows of tensor trains, from a native scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._native.scan import scan
from jax_tt._table.types import State


@best_rows.register(TTTable)
def best_of_train(table: TTTable, state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        cores = {name: state[name].astype(jnp.float32) for name in table.spec.param_names}
        asked = queries.vectors, queries.exclude, queries.present, queries.k
        return scan("train", cores, table.sizes.attributes, *asked)

    return best_scanned(table, state, queries, scanned)
