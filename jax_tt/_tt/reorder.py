"""`tt.reorder`: a tensor-train table in another order of its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tt._base.arguments import concrete, mismatch, type_of
from jax_tt._base.rows_of_arrays import row_weights
from jax_tt._ids.id_order import IdOrder, OrderedRows
from jax_tt._tt.approximation import Approximation
from jax_tt._tt.cores import checked_cores
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.rows import TrainRows
from jax_tt._tt.shape import TTShape


def tt_reorder(
    cores: Sequence[Any],
    old_order: IdOrder | None,
    new_order: IdOrder,
    ranks: int | Sequence[int] | None = None,
    **options: Any,
) -> Approximation:
    """Cores for a new order of ids, in which every id has nearly the same row as in the old order.

    The result is `tt.from_dense` of the old table with its rows in the new order, which is computed block by block as
    it is read. With N rows, D columns and rank r, the memory is that of `tt.from_dense`, plus two factors of the old
    table, ``r (heads q_left + tails q_right)`` float64 numbers at the cut of the train where this is smallest: at the
    peak 375 MB for 1,000,000 rows of 64 at rank 16, most of it blocks of rows, whose size does not depend on N.

    The error depends on the orders: a table that is a tensor train of these ranks in both of them is preserved up to
    rounding; rows that shared slices by chance in the old order cannot all be represented in the new one. ``weights``
    of 1 for all rows add sweeps of least squares over all rows.

    Args:
        cores: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]``, on the host or on a device, outside of jit.
        old_order: their current `IdOrder`, or None if ids are rows.
        new_order: the new `IdOrder`; `IdOrder.identity` if ids are to be rows.
        ranks, shape, tolerance, max_bytes, row_factors, col_factors: as in `tt.from_dense`, at most one of the first
            four; factors and ranks that are not given are those of ``cores``.
        **options: the others of `tt.from_dense`: ``weights`` by id, e.g. the number of requests of each id, ``sweeps``,
            ``seed``, ``progress``, and ``dtype`` of the new cores, by default that of the old ones.

    Returns:
        `tt.Approximation`: the new cores, their shape, and the difference between the new and the old rows.

    Raises:
        ValueError: the orders differ in length, ``cores`` hold NaN or infinity, or an argument is invalid.
        TypeError: ``new_order`` is not an `IdOrder`, or ``cores`` are traced.

    >>> import jax, jax_tt, numpy as np
    >>> shape = jax_tt.TTShape(1000, 8, 4, (10, 10, 10), (2, 2, 2))
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> order = jax_tt.order.IdOrder(np.arange(1000)[::-1])
    >>> reordered = jax_tt.tt.reorder(cores, None, order)
    >>> reordered.shape == shape, reordered.relative_error < 1e-5
    (True, True)
    >>> row = jax_tt.tt.lookup(reordered.cores, order.apply(7))  # as row 7 was
    >>> bool(jax.numpy.allclose(row, jax_tt.tt.lookup(cores, 7), atol=1e-6))
    True
    """
    for name, order in (("old_order", old_order), ("new_order", new_order)):
        if not isinstance(order, IdOrder) and (name, order) != ("old_order", None):
            expected = "a jax_tt.order.IdOrder, e.g. jax_tt.order.from_interactions(pairs, shape)"
            raise mismatch(name, type_of(order), expected, error=TypeError)
    table, arrays = checked_cores(cores, new_order.num_embeddings, name="cores")
    check_cores(arrays)
    rows, shape = TrainRows(arrays, table.shape), table.shape
    return reordered_rows(rows, shape, old_order, new_order, ranks=ranks, **options)


def reordered_rows(
    rows: Any,
    old_shape: TTShape,
    old_order: IdOrder | None,
    new_order: IdOrder,
    *,
    weights: Any = None,
    **options: Any,
) -> Approximation:
    """`tt.reorder` of anything that is indexed by rows; what is not said of the new shape is that of the old one."""
    moved = new_order
    if old_order is not None:
        if old_order.num_embeddings != new_order.num_embeddings:
            got = f"an order of {new_order.num_embeddings} ids"
            expected = f"{old_order.num_embeddings}, as old_order"
            fix = "A table gets more rows with jax_tt.tt.grow."
            raise mismatch("new_order", got, expected, fix)
        moved = IdOrder(np.asarray(new_order.rows)[old_order.inverse.rows])
    weights = row_weights(weights, new_order.num_embeddings)
    if weights is not None:
        weights = weights[new_order.inverse.rows]
    for default in (
        {"row_factors": old_shape.row_factors, "col_factors": old_shape.col_factors},
        {"ranks": old_shape.ranks, "tolerance": None, "max_bytes": None},
    ):
        if all(options.get(name) is None for name in ("shape", *default)):
            options |= default
    return tt_from_dense(OrderedRows(rows, moved), weights=weights, **options)


def check_cores(cores: Sequence[Any]) -> None:
    """Refuses cores that cannot be read or fitted."""
    for k, core in enumerate(cores):
        concrete("cores", core, "A table is reordered on the host, outside of jit.")
        if not np.isfinite(np.asarray(core).astype(np.float64)).all():
            raise ValueError(f"cores: core {k} holds NaN or infinity; expected finite numbers.")
