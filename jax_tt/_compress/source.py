"""The rows that small tables are made of, and the errors of these tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._base.rows_of_arrays import dense_table, row_blocks
from jax_tt._base.storage import STORAGE
from jax_tt._lookup.calls import lookup_rows
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table
from jax_tt._table.types import State
from jax_tt._tt.approximation import errors
from jax_tt._tt.rows import Rows, blocks

# Numbers that are looked up or rounded at a time.
BLOCK = 2**22
# Numbers that are squared at a time.
_SQUARES = 2**20

Made = tuple[Table, dict[str, jax.Array]]
Found = Iterator[tuple[str, Callable[..., Made], dict[str, int]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Rows to compress.

    Attributes:
        rows: ``[N, D]`` on the host.
        weights: importance of every row ``[N]``, or None.
        param_dtype: type of codebooks and cores.
        seed: of fits.
    """

    rows: Any
    weights: np.ndarray | None
    param_dtype: Any
    seed: int

    @property
    def sizes(self) -> tuple[int, int]:
        n, features = self.rows.shape
        return int(n), int(features)

    @functools.cached_property
    def concentration(self) -> float:
        """The share of the quarter of rows with the largest weighted squares in the sum of these."""
        squares = np.sort(weighted_squares(self.rows, self.weights))[::-1]
        return float(squares[: -(-len(squares) // 4)].sum() / max(squares.sum(), 1e-30))


def stored_rows(rows: Any) -> Any:
    """Rows ``[N, D]`` on the host, of a type that tables are stored in."""
    rows = dense_table(rows, "rows")
    if jnp.dtype(rows.dtype).name not in STORAGE:
        raise ValueError(f"rows: got dtype {rows.dtype}; expected one of {', '.join(STORAGE)}.")
    return rows


def weighted_squares(rows: Any, weights: np.ndarray | None) -> np.ndarray:
    """The squared lengths of rows ``[N, D]`` times weights."""
    squares = [np.einsum("nd,nd->n", some, some) for _, some in row_blocks(rows, _SQUARES)]
    joined = np.concatenate(squares).astype(np.float64)
    return joined if weights is None else weights * joined


def measured_errors(
    original: Any, table: Table, state: State, progress: Progress | None = None
) -> tuple[float, dict[float, float]]:
    """The relative error of a table against the dense original, and the errors of its rows by quantile."""
    return errors(Rows(original), looked_up(table, state, progress or Progress(False)))


def looked_up(table: Table, state: State, progress: Progress) -> Iterator[tuple[int, np.ndarray]]:
    """All rows of a table in blocks, float64 ``[n, D]``, and the id of the first row of each."""
    parts = blocks(table.num_embeddings, BLOCK // table.features)
    step = progress.begin("error", len(parts))
    for ids in parts:
        rows, _ = lookup_rows(
            table, state, jnp.arange(ids.start, ids.stop), Lookup(dtype=jnp.float32)
        )
        yield ids.start, np.asarray(rows, np.float64)
        step()
