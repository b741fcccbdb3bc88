"""Growing and reordering a table of any kind between steps."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_tt._base.arguments import as_int, concrete, expect_ids, mismatch
from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._kinds.ordered.table import check_id_order
from jax_tt._table.change import Change, Growth, Orders, grow, reorder, under_order
from jax_tt._table.check import check_table
from jax_tt._table.state import State
from jax_tt._table.table import Table

_BETWEEN = "A table is reordered or grows between steps, outside of jit."


def grow_table(
    table: Table,
    state: State,
    num_embeddings: int,
    *,
    key: jax.Array,
    like: Any = None,
    method: str = "auto",
) -> Change:
    """Adds rows to a table; the arrays of existing rows are unchanged, bit for bit.

    New rows of a dense table follow its ``embedding_init``, with fresh optimizer state. If necessary, the first row
    factor of a tensor train grows: slices from its ``core_init`` are appended to the first core, with fresh optimizer
    state. An order of ids is continued by the new ids in the new rows. Cached rows stay cached, and keep their slots
    unless the cache was larger than the table. See `tt.grow` for rows that the factors already covered. Call it
    between steps, outside of ``jit``.

    Args:
        table: that of `dense_table` or `tt_table`, in any wrappers.
        state: its arrays by name.
        num_embeddings: the new number of ids, at least the present one.
        key: for the initial values of new rows.
        like: one id, or one for every new id; the new rows start near the rows of these ids, or equal to them in a
            dense table.
        method: as in `Lookup`.

    Returns:
        The larger table and its state.

    Raises:
        ValueError: there are fewer rows than before, they do not fit into memory, or they cannot be divided over the
            devices that the present ones are sharded over.

    Example:
        >>> import jax, jax_tt
        >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
        >>> state = table.init(jax.random.key(0))
        >>> table, state = jax_tt.tables.grow(table, state, 1200, key=jax.random.key(1))
        >>> table.num_embeddings, table.row_factors
        (1200, (12, 10, 10))
    """
    check_table(table, state)
    concrete("state", state, _BETWEEN)
    if like is not None:
        _check_like(
            like,
            as_int("num_embeddings", num_embeddings) - table.num_embeddings,
            table.num_embeddings,
        )
    change = grow(table, state, Growth(num_embeddings, key, like, method))
    try:  # otherwise, only a later call would fail
        jax.block_until_ready(change.state)
    except jax.errors.JaxRuntimeError as error:
        got = f"{num_embeddings}, whose arrays could not be made"
        expected = f"as many rows as fit into memory beside the present {table.num_embeddings}"
        raise mismatch(f"{table.ids.label}num_embeddings", got, expected) from error
    return change


def reorder_table(table: Table, state: State, id_order: IdOrder, **options: Any) -> Change:
    """Changes the order of ids; every id keeps its row up to the approximation error of the cores.

    `tt.reorder` computes the new cores, fitted to the cached values of cached rows; the cache is empty
    afterwards. Optimizer slots are reset to their mean over each core, and the step count is kept. Call it between
    steps, outside of ``jit``.

    Args:
        table: e.g. that of `tt_table`, with or without an order of ids.
        state: its arrays by name.
        id_order: `IdOrder` of ``num_embeddings`` ids.
        **options: ``ranks``, ``shape``, ``tolerance`` and the other arguments of `tt.reorder` except ``dtype``;
            factors and ranks default to the present ones.

    Returns:
        The table and its state. The attribute ``approximation`` of the result has the error of the new rows.

    Example:
        >>> import jax, jax_tt, numpy as np
        >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4, row_factors=(10, 10, 10))
        >>> state = table.init(jax.random.key(0))
        >>> order = jax_tt.order.IdOrder(np.arange(1000)[::-1])
        >>> table, state = jax_tt.tables.reorder(table, state, order)
        >>> int(state["id_order"][0])
        999
    """
    check_table(table, state)
    concrete("state", state, _BETWEEN)
    if id_order is None:
        expected = "a jax_tt.order.IdOrder, e.g. IdOrder.identity(num_embeddings), ids as rows"
        raise mismatch("id_order", "None", expected, error=TypeError)
    check_id_order(id_order, table.num_embeddings)
    if "dtype" in options:
        fix = "Give the cores of tt.reorder to a table of another param_dtype."
        expected = "none, as a table keeps its param_dtype"
        raise mismatch("dtype", repr(options["dtype"]), expected, fix, TypeError)
    change = reorder(table, state, Orders(id_order, options))
    return change if ID_ORDER in table.spec.buffers else under_order(change.table, change, id_order)


def _check_like(like: Any, count: int, num_embeddings: int) -> None:
    """Raises unless ``like`` holds existing ids, one or as many as there are new ids."""
    ids = np.asarray(like)
    if ids.dtype.kind not in "iu" or ids.shape not in ((), (count,)):
        raise mismatch("like", ids, f"an id, or one for each of the {count} new ids")
    expect_ids("like", ids.reshape(-1), num_embeddings, "the ids of the table")
