"""The rows that small tables are made of, and the errors of these tables."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import expect
from jax_tt._base.progress import Progress
from jax_tt._base.rows_of_arrays import dense_table, row_blocks
from jax_tt._base.storage import STORAGE
from jax_tt._compress.host_rows import host_rows
from jax_tt._table.copies import with_update, without_values
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._tt.approximation import errors
from jax_tt._tt.rows import Rows, blocks

# Numbers that are looked up or rounded at a time.
BLOCK = 2**22
# Numbers that are squared at a time.
_SQUARES = 2**20

# The relative error beyond which most of a table is lost.
POOR = 0.7

# Rows of a sample, on which tables are tried first, and neighbouring ones among them.
SAMPLE = 2**12
_RUNS = 32

Made = tuple[Table, dict[str, jax.Array]]


def loss(error: float) -> str:
    """What is said of every table that is made with this relative error: nothing if most of it is kept."""
    if error <= POOR:
        return ""
    return f"most of it is lost, with a relative error of {error:.3g}: more bytes, or another order of its ids"


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Rows to compress.

    Attributes:
        rows: ``[N, D]`` on the host.
        weights: importance of every row ``[N]``, or None.
        param_dtype: type of codebooks and cores.
        seed: of fits.
        whole: number of rows of the table of which ``rows`` are a sample; None if they are all.
    """

    rows: Any
    weights: np.ndarray | None
    param_dtype: Any
    seed: int
    whole: int | None = None
    _kept: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    _lock: Any = dataclasses.field(default_factory=threading.RLock, init=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returned for a key at first; tables of several sizes share fits to the rows."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]

    @property
    def sizes(self) -> tuple[int, int]:
        n, features = self.rows.shape
        return int(n), int(features)

    def share(self, count: int) -> int:
        """What of ``count`` bytes or rows of the whole table these rows have."""
        n, _ = self.sizes
        return count if self.whole is None else count * n // self.whole

    def sample(self, count: int = SAMPLE) -> Source:
        """Runs of neighbouring rows from all parts of the table, about ``count`` in all; itself if it has no more."""
        n, _ = self.sizes
        if n <= count:
            return self
        starts = np.linspace(0, n - count // _RUNS, _RUNS).astype(np.int64)
        ids = np.unique(starts[:, None] + np.arange(count // _RUNS))
        weights = None if self.weights is None else self.weights[ids]
        # Without any weight, errors would be relative to nothing.
        weights = weights if weights is not None and weights.any() else None
        rows = np.asarray(self.rows[ids], np.float32)
        return dataclasses.replace(self, rows=rows, weights=weights, whole=n)

    @functools.cached_property
    def concentration(self) -> float:
        """The share of the quarter of rows with the largest weighted squares in the sum of these."""
        squares = np.sort(weighted_squares(self.rows, self.weights))[::-1]
        return float(squares[: -(-len(squares) // 4)].sum() / max(squares.sum(), 1e-30))


def stored_rows(rows: Any) -> Any:
    """Rows ``[N, D]`` on the host, of a type that tables are stored in."""
    rows = dense_table(rows, "rows")
    expect(jnp.dtype(rows.dtype).name in STORAGE, "rows", rows, f"one of {', '.join(STORAGE)}")
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


def explained(source: Source, table: Table, state: State) -> float:
    """1 minus the weighted squared error of the rows over their weighted squares; -inf where that is no number."""
    error = whole = 0.0
    pairs = zip(
        row_blocks(source.rows, BLOCK, np.float64),
        looked_up(table, state, Progress(False)),
        strict=True,
    )
    for (start, rows), (_, small) in pairs:
        some = slice(start, start + len(rows))
        weights = 1.0 if source.weights is None else source.weights[some, None]
        error += float(np.sum(weights * (rows - small) ** 2))
        whole += float(np.sum(weights * rows**2))
    if math.isnan(error):
        return -math.inf
    return 1.0 - error / whole if whole > 0 else 1.0


def looked_up(table: Table, state: State, progress: Progress) -> Iterator[tuple[int, np.ndarray]]:
    """All rows of a table in blocks, float64 ``[n, D]``, and the id of the first row of each."""
    # Equal tables share a program. What is not needed here may not be hashable.
    table = without_values(with_update(table, None))
    parts = blocks(table.num_embeddings, BLOCK // table.features)
    step = progress.begin("error", len(parts))
    for ids in parts:
        yield ids.start, host_rows(table, state, ids).astype(np.float64)
        step()
