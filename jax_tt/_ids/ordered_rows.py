"""A view of a dense table in another order."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_tt._ids.id_order import IdOrder


class OrderedRows:
    """A table ``[N, D]`` with its rows in another order, read by slices and never copied as a whole."""

    def __init__(self, table: Any, order: IdOrder):
        if table.shape[0] != order.num_embeddings:
            raise ValueError(
                f"order: orders {order.num_embeddings} ids; expected {table.shape[0]}, the rows of the table."
            )
        self._table = np.asarray(table) if isinstance(table, jax.Array) else table
        self._ids = order.inverse.rows
        self.shape, self.dtype = self._table.shape, self._table.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        ids = self._ids[rows]
        found = self._table[ids]
        finite = np.isfinite(found.astype(np.float32)).all(axis=1)
        if not finite.all():
            bad = int(ids[np.argmin(finite)])
            raise ValueError(
                f"table: the row of id {bad} holds NaN or infinity; expected finite numbers."
            )
        return found
