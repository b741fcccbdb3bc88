"""`tt.to_table`: tensor trains as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._ids.stored_order import on_device
from jax_tt._kinds.ordered.table import OrderedTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._table.options import Update
from jax_tt._table.table import Table
from jax_tt._tt.approximation import Approximation


def tt_to_table(
    train: Approximation | Sequence[Any],
    id_order: IdOrder | None = None,
    *,
    num_embeddings: int | None = None,
    update: Update | None = None,
    name: str | None = None,
) -> tuple[Table, dict[str, jax.Array]]:
    """Makes a table of a tensor train, and its state.

    Args:
        train: the result of `tt.from_dense`, or cores ``[p_k, r_k, q_k, r_{k+1}]``.
        id_order: `IdOrder` from ids to the rows of the train, or None where ids are rows.
        num_embeddings: number of rows, if the cores address more; that of a result of `tt.from_dense` is known.
        update: `Update` of a fused table, or None.
        name: of the table in error messages.

    Returns:
        A `TTTable`, or an `OrderedTable` of one, and its state.

    Raises:
        ValueError, TypeError: the cores do not fit together, or the order is one of another number of ids.

    >>> import jax.numpy as jnp, jax_tt, numpy as np
    >>> found = jax_tt.tt.from_dense(np.ones((1000, 8), np.float32), 1)
    >>> table, state = jax_tt.tt.to_table(found)
    >>> rows, _ = jax_tt.lookup(table, state, jnp.array([3, 999]), jax_tt.Lookup())
    >>> table.shape == found.shape, rows.shape
    (True, (2, 8))
    """
    cores: Sequence[Any]
    if isinstance(train, Approximation):
        cores, num_embeddings = train.cores, train.shape.num_embeddings
    else:
        cores = train
    table, arrays = TTTable.of(cores, num_embeddings, update, name)
    params = dict(zip(table.spec.param_names, arrays, strict=True))
    state = table.init_rest(params) | params
    if id_order is None:
        return table, state
    return OrderedTable(table, id_order), state | {ID_ORDER: on_device(id_order.rows)}
