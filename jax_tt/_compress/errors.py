"""Errors of the rows of a table of any kind against a dense original."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._lookup.calls import lookup_rows
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table
from jax_tt._table.types import State
from jax_tt._tt.approximation import errors
from jax_tt._tt.rows import Rows

_BLOCK = 1 << 22  # numbers


def measured_errors(
    original: Any, table: Table, state: State, progress: Progress | None = None
) -> tuple[float, dict[float, float]]:
    """The relative error of a table against the dense original, and those of its rows by quantile."""
    return errors(Rows(original), _blocks(table, state, progress or Progress(False)))


def _blocks(table: Table, state: State, progress: Progress) -> Iterator[tuple[int, np.ndarray]]:
    size = max(1, _BLOCK // table.features)
    starts = range(0, table.num_embeddings, size)
    step = progress.begin("error", len(starts))
    for start in starts:
        ids = jnp.arange(start, min(start + size, table.num_embeddings))
        rows, _ = lookup_rows(table, state, ids, Lookup(dtype=jnp.float32))
        yield start, np.asarray(rows, np.float64)
        step()
