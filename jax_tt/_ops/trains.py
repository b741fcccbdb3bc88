"""`jax_tt.tt`: lookups, the whole table and scores of tensor trains that are given as cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._base.arguments import as_dtype
from jax_tt._base.environment import resolve_method
from jax_tt._ids.bags import Bags
from jax_tt._ids.id_order import ID_ORDER, IdOrder
from jax_tt._ids.stored_order import on_device
from jax_tt._kinds.ordered.table import OrderedTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._lookup.rows import lookup_rows, pooled_rows
from jax_tt._ops.lookup import attend
from jax_tt._table.options import DEFAULT_BOUNDS, Lookup, Update
from jax_tt._table.table import Table
from jax_tt._table.whole import to_dense
from jax_tt._tt.approximation import Approximation


def tt_lookup(
    cores: Sequence[jax.Array],
    ids: Any,
    *,
    num_embeddings: int | None = None,
    bounds: str = DEFAULT_BOUNDS,
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Rows of a tensor-train table, one per id.

    Args:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        ids: integers of any shape, or `SplitIds`.
        num_embeddings: number of valid rows; default all that the cores address.
        bounds: treatment of ids outside ``[0, num_embeddings)``: ``"warn"`` reads zeros with an
            `OutOfRangeWarning`, ``"zero"`` without one, ``"clip"`` reads the nearest row, ``"error"`` raises on CPU
            (NaN from the reference), ``"unchecked"`` assumes that there are none.
        dtype: type of the result; default that of the cores. Sums are in float32 or better.
        method: ``"auto"``, ``"reference"`` (pure JAX) or ``"native"`` (native).
        axis_name: mesh axes to sum the cores' gradients over, inside a ``shard_map`` with ``check_vma=False``; with
            ``check_vma=True`` JAX does this itself.
        name: name of the table in error messages.
        precision: of float32 products on a GPU; default `jax.default_matmul_precision`, or full if that is not set.
            The native CPU kernels always compute in float32, or in float64 for float64 cores.

    Returns:
        ``[*ids.shape, D]``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> jax_tt.tt.lookup(cores, jax.numpy.array([[1, 2, 999]]), method="reference").shape
    (1, 3, 8)
    """
    lookup = Lookup("sum", bounds, dtype, precision, method, axis_name)
    table, cores = TTTable.of(cores, num_embeddings, name=name)
    state = table.spec.named(cores)
    return lookup_rows(table, state, ids, lookup)[0]


def tt_embed_bag(
    cores: Sequence[jax.Array],
    bags: Bags | Any,
    *,
    combiner: str = "sum",
    num_embeddings: int | None = None,
    bounds: str = DEFAULT_BOUNDS,
    dtype: Any = None,
    method: str = "auto",
    axis_name: Any = None,
    name: str | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """One vector per bag: the sum, the mean, ``sqrtn`` or the maximum of its rows.

    Args:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
        combiner: ``"sum"``; ``"mean"`` divides by the sum of the weights, ``"sqrtn"`` by the root of the sum of their
            squares (the count and its root without weights), ``"mean_count"`` always by the count. A zero divisor
            gives 0. ``"max"`` is the maximum of each column and takes no weights; its gradient goes to the first id of
            the bag with the maximum.
        num_embeddings, bounds, dtype, method, axis_name, name, precision: as in `tt.lookup`.

    Returns:
        ``[B, D]``; an empty bag is 0. Differentiable in the cores and in ``bags.weights``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> bags = jax_tt.Bags.from_ragged([[1, 2, 3], [], [4]])
    >>> jax_tt.tt.embed_bag(cores, bags, combiner="mean", method="reference").shape
    (3, 8)
    """
    lookup = Lookup(combiner, bounds, dtype, precision, method, axis_name)
    table, cores = TTTable.of(cores, num_embeddings, name=name)
    state = table.spec.named(cores)
    return pooled_rows(table, state, bags, lookup)[0]


def tt_to_dense(
    cores: Sequence[jax.Array],
    num_embeddings: int | None = None,
    *,
    dtype: Any = None,
    method: str = "auto",
) -> jax.Array:
    """The dense table that the cores represent.

    Args:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        num_embeddings: rows to keep; default all that the cores address.
        dtype: type of the result; default that of the cores.
        method: checked for validity only; all methods are the same matrix products in XLA.

    Returns:
        ``[N, D]``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> jax_tt.tt.to_dense(jax_tt.tt.init(jax.random.key(0), shape), 1000).shape
    (1000, 8)
    """
    resolve_method(method)
    table, cores = TTTable.of(cores, num_embeddings)
    state = table.spec.named(cores)
    return to_dense(table, state).astype(as_dtype("dtype", dtype, cores[0].dtype))


def tt_attend(
    cores: Sequence[jax.Array],
    query: jax.Array,
    num_embeddings: int | None = None,
    *,
    dtype: Any = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """``query @ table.T`` without building the table.

    Args:
        cores: ``d`` arrays ``[p_k, r_k, q_k, r_{k+1}]``.
        query: floats ``[..., D]``.
        num_embeddings: rows to score; default all that the cores address.
        dtype: type of the result; default the wider type of ``query`` and the cores.
        precision: of the products, as in `tt.lookup`; they are computed by XLA.

    Returns:
        ``[..., N]``.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)
    >>> jax_tt.tt.attend(cores, jax.numpy.ones((5, 8)), 1000).shape
    (5, 1000)
    """
    table, cores = TTTable.of(cores, num_embeddings)
    state = table.spec.named(cores)
    return attend(table, state, query, dtype, precision)


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

    >>> import jax.numpy as jnp, jax_tt, numpy as np
    >>> train = jax_tt.tt.from_dense(np.ones((1000, 8), np.float32), 1)
    >>> table, state = jax_tt.tt.to_table(train)
    >>> rows, _ = jax_tt.lookup(table, state, jnp.array([3, 999]), jax_tt.Lookup())
    >>> table.shape == train.shape, rows.shape
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
