"""`residual_table`: the sum of tensor trains that `tt_residuals` found, as one table."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jax_tt._compress.residuals import TTResidual
from jax_tt._files.tables import StoredTable
from jax_tt._ids.id_order import ID_ORDER
from jax_tt._ids.stored_order import on_device
from jax_tt._kinds.composite.sum import SumTable
from jax_tt._kinds.ordered.table import OrderedTable
from jax_tt._kinds.tensor_train.table import TTTable
from jax_tt._table.options import Update


def residual_table(
    terms: Iterable[TTResidual | StoredTable],
    *,
    update: Update | None = None,
    name: str | None = None,
) -> tuple[SumTable, dict[str, jax.Array]]:
    """The table whose rows are the sums of the rows of tensor trains with different orders of ids, and its state.

    Args:
        terms: at least one, as `tt_residuals` returns them, or as `load_tables` reads those that
            ``jax-tt compress --kind tt_sum`` has written.
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
    >>> table, state = jax_tt.residual_table(jax_tt.tt_residuals(rows, shapes, progress=False))
    >>> pooled, _ = jax_tt.pooled_rows(table, state, jnp.array([[3, 399], [7, 7]]), jax_tt.Lookup())
    >>> pooled.shape, len(table.tables)
    ((2, 16), 3)
    """
    if not isinstance(terms, Iterable):
        raise TypeError(f"terms: got {terms!r}; expected the result of jax_tt.tt_residuals.")
    tables, states = [], []
    for k, term in enumerate(terms):
        if not isinstance(term, TTResidual | StoredTable):
            raise TypeError(
                f"terms[{k}]: got a {type(term).__name__}; expected a jax_tt.TTResidual or a jax_tt.StoredTable."
            )
        found = term.approximation if isinstance(term, TTResidual) else term
        own = TTTable.of_shape(found.shape, param_dtype=found.cores[0].dtype, update=update)
        state = {f"core_{k}": jnp.asarray(core) for k, core in enumerate(found.cores)}
        if term.id_order is not None:
            own, state[ID_ORDER] = OrderedTable(own, term.id_order), on_device(term.id_order.rows)
        tables.append(own)
        states.append(state)
    table = SumTable(tuple(tables), name)
    params = table.joined(states)
    return table, table.init_rest(params) | params
