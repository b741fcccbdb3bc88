"""The whole of a table: its rows, and the scores of all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import digits_in_range
from jax_tt._table.state import State
from jax_tt._table.wrapper import dispatched


@dispatched
def to_dense(table: Any, state: State) -> jax.Array:
    """All rows of a table, ``[N, D]``, in the accumulator type. Kinds register what they do.

    >>> import jax, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> jax_tt.tables.to_dense(table, table.init(jax.random.key(0))).shape
    (1000, 8)
    """
    ids = jnp.arange(table.num_embeddings)
    batch = Batch(ids[:, None], None, None, rectangular=True)
    digits, _ = digits_in_range(table.ids, batch)
    return table.rows(table.spec.params(state), [d[:, 0] for d in digits], lax.Precision.HIGHEST)


@dispatched
def attend(table: Any, state: State, query: jax.Array, precision: Any) -> jax.Array:
    """Products of ``query[B, D]`` with every row of a table, ``[B, N]``. Kinds register what they do.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> state = table.init(jax.random.key(0))
    >>> jax_tt.extension.attend(table, state, jnp.ones((2, 8)), None).shape
    (2, 1000)
    """
    return jnp.einsum("bd,nd->bn", query, to_dense(table, state), precision=precision)
