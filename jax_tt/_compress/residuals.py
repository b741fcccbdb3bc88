"""`tt.residuals`: a dense table as a sum of tensor trains in different orders of ids, and `residual_table` of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tt._base.arguments import as_dtype, as_int, expect, instance_of, mismatch, type_of
from jax_tt._base.progress import Progress
from jax_tt._base.rows_of_arrays import dense_table
from jax_tt._ids.id_order import IdOrder, OrderedRows
from jax_tt._kinds.composite.sum import SumTable
from jax_tt._ops.trains import tt_to_table
from jax_tt._table.copies import with_update
from jax_tt._table.options import Update
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._tt.approximation import Approximation, rows_of
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.shape import TTShape
from jax_tt.order._table import from_table


class Residual(NamedTuple):
    """One term of a sum of tensor trains; made by `tt.residuals`.

    Attributes:
        id_order: the row of each id in this term.
        approximation: cores and shape. Its errors are relative to what the previous terms leave of the table.
        relative_error: of the sum up to this term: Frobenius norm of the remainder over the norm of the table.

    >>> import numpy as np, jax_tt
    >>> table = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    >>> first, second = jax_tt.tt.residuals(table, [jax_tt.TTShape(60, 8, 2, (8, 8), (8, 1))] * 2, progress=False)
    >>> second.relative_error < first.relative_error
    True
    """

    id_order: IdOrder
    approximation: Approximation
    relative_error: float


def tt_residuals(
    table: Any,
    shapes: Sequence[TTShape],
    *,
    refine: int = 4,
    dtype: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> tuple[Residual, ...]:
    """Approximates a dense table by a sum of tensor trains, each fitted to the remainder of the previous ones.

    All parameters of a tensor train are shared among ids, which differ only in their places. A second
    train in the same order is equivalent to higher ranks, but one in another order gives every id a second place. At
    the same number of parameters, a few trains of low rank with different orders therefore approximate a table with
    little structure better than a single one, at the price of 2 to 4 bytes per id and order. The row of an id is the
    sum of its rows in all terms. To continue training, create a layer for each of them, `TTEmbed(..., id_order=...)`,
    and sum their outputs.

    For vectors the same idea is called residual quantisation: Y. Chen et al., "Approximate nearest neighbor search by
    residual vector quantization", Sensors 2010.

    The order of each term is made by `order.from_table`, and its cores by `tt.from_dense`. Every term takes the time of
    both functions; in addition to their memory, a float32 copy of the table is needed.

    Args:
        table: floats ``[N, D]``, on the host.
        shapes: a `TTShape` of N and D for each term, the largest first if they differ; `tt.residual_shapes` chooses
            them for a number of bytes.
        refine: rounds of `order.from_table`, at least 0.
        dtype: storage type of the cores, by default that of the table. Later terms correct its rounding.
        seed: of the randomised parts; equal seeds give equal terms.
        progress: show progress bars, two for each term.

    Returns:
        A `tt.Residual` for each shape. ``[-1].relative_error`` is the error of the whole sum.

    Raises:
        ValueError: ``table`` is not finite or does not have the sizes of the shapes, or there are no shapes.
        TypeError: ``shapes`` contains something other than a `TTShape`.

    >>> import numpy as np, jax_tt
    >>> table = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
    >>> alone = jax_tt.TTShape(400, 16, 6, (20, 20), (16, 1))
    >>> thirds = [jax_tt.TTShape(400, 16, 2, (20, 20), (16, 1))] * 3  # as many parameters
    >>> error = lambda shapes: jax_tt.tt.residuals(table, shapes, progress=False)[-1].relative_error
    >>> error(thirds) < 0.95 * error([alone])
    True
    """
    shapes = _as_shapes(shapes)
    table = dense_table(table)
    if table.shape != (shapes[0].num_embeddings, shapes[0].features):
        expected = f"[{shapes[0].num_embeddings}, {shapes[0].features}], the table of `shapes`"
        raise mismatch("table", table, expected)
    dtype = as_dtype("dtype", dtype, table.dtype)
    seed = as_int("seed", seed)
    left = np.array(table, np.float32)
    error, terms = 1.0, []
    for shape in shapes:
        id_order = from_table(left, shape, refine=refine, seed=seed, progress=progress)
        ordered = OrderedRows(left, id_order)
        train = tt_from_dense(ordered, shape=shape, dtype=dtype, seed=seed, progress=progress)
        rows = id_order.inverse.rows
        for start, value in rows_of(train.cores, shape, Progress(False)):
            left[rows[start : start + len(value)]] -= value.astype(np.float32)
        error *= train.relative_error
        terms.append(Residual(id_order, train, error))
    return tuple(terms)


def _as_shapes(value: Any) -> tuple[TTShape, ...]:
    shapes = tuple(value) if isinstance(value, Sequence) else (value,)
    expect(shapes, "shapes", "none", "a TTShape for each term")
    for shape in shapes:
        instance_of("shapes", shape, TTShape, "TTShapes, one for each term")
    sizes = {(shape.num_embeddings, shape.features) for shape in shapes}
    expect(len(sizes) <= 1, "shapes", f"tables of {sorted(sizes)}", "one size")
    return shapes


def residual_table(
    terms: Iterable[Residual | tuple[Table, State]],
    *,
    update: Update | None = None,
    name: str | None = None,
) -> tuple[SumTable, dict[str, jax.Array]]:
    """The table whose rows are the sums of the rows of tensor trains with different orders of ids, and its state.

    Args:
        terms: at least one, as `tt.residuals` returns them, or tables with their states.
        update: `Update` of a fused table, or None.
        name: of the table in error messages.

    Returns:
        A `SumTable` of an `OrderedTable` for each term, and its state with the cores of the terms.

    Raises:
        ValueError: there are no terms, or they are of tables of different sizes.
        TypeError: ``terms`` contains something else.

    >>> import jax, jax.numpy as jnp, jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
    >>> shapes = [jax_tt.TTShape(400, 16, 2, (20, 20), (16, 1))] * 3
    >>> table, state = jax_tt.compression.residual_table(jax_tt.tt.residuals(rows, shapes, progress=False))
    >>> pooled, _ = jax_tt.lookup_bags(table, state, jnp.array([[3, 399], [7, 7]]), jax_tt.Lookup())
    >>> pooled.shape, len(table.tables)
    ((2, 16), 3)
    """
    instance_of("terms", terms, Iterable, "the result of jax_tt.tt.residuals")
    tables, states = [], []
    for k, term in enumerate(terms):
        if isinstance(term, Residual):
            term = tt_to_table(term.approximation, term.id_order)
        elif not (isinstance(term, tuple) and len(term) == 2 and isinstance(term[0], Table)):
            expected = "a jax_tt.tt.Residual, or a table with its state"
            raise mismatch(f"terms[{k}]", type_of(term), expected, error=TypeError)
        tables.append(with_update(term[0], update))
        states.append(term[1])
    table = SumTable(tuple(tables), name)
    params = table.joined(states)
    return table, table.init_rest(params) | params
