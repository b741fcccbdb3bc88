"""`residual_table`: the sum of tensor trains that `tt.residuals` found, as one table."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from jax_tt._compress.residuals import Residual
from jax_tt._kinds.composite.sum import SumTable
from jax_tt._ops.to_table import tt_to_table
from jax_tt._table.copies import with_update
from jax_tt._table.options import Update
from jax_tt._table.table import Table
from jax_tt._table.types import State


def residual_table(
    terms: Iterable[Residual | tuple[Table, State]],
    *,
    update: Update | None = None,
    name: str | None = None,
) -> tuple[SumTable, dict[str, jax.Array]]:
    """The table whose rows are the sums of the rows of tensor trains with different orders of ids, and its state.

    Args:
        terms: at least one, as `tt.residuals` returns them, or tables with their states, as `files.load` reads those
            that ``jax-tt compress --kind tt_sum`` writes.
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
    >>> pooled, _ = jax_tt.lookup_bags(table, state, jnp.array([[3, 399], [7, 7]]))
    >>> pooled.shape, len(table.tables)
    ((2, 16), 3)
    """
    if not isinstance(terms, Iterable):
        raise TypeError(f"terms: got {terms!r}; expected the result of jax_tt.tt.residuals.")
    tables, states = [], []
    for k, term in enumerate(terms):
        if isinstance(term, Residual):
            term = tt_to_table(term.approximation, term.id_order)
        elif not (isinstance(term, tuple) and len(term) == 2 and isinstance(term[0], Table)):
            raise TypeError(
                f"terms[{k}]: got a {type(term).__name__}; expected a jax_tt.tt.Residual, or a table with its state."
            )
        tables.append(with_update(term[0], update))
        states.append(term[1])
    table = SumTable(tuple(tables), name)
    params = table.joined(states)
    return table, table.init_rest(params) | params
