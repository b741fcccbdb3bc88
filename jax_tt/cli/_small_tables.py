"""The quantized and coded tables of a file, as ``jax-tt info`` lists them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._algebra.approximation import errors
from jax_tt._algebra.rows import Rows
from jax_tt._coded.table import CodedTable
from jax_tt._coded.words import in_words
from jax_tt._files.coded import load_coded
from jax_tt._files.quantized import load_quantized
from jax_tt._files.stored import StoredArrays
from jax_tt._lookup.calls import lookup_rows
from jax_tt._progress import Progress
from jax_tt._quantized.table import QuantizedTable
from jax_tt._tables.options import Lookup

_LOADERS = {"quantized": load_quantized, "coded": load_coded}
_BLOCK = 1 << 22  # numbers

Pair = tuple[QuantizedTable | CodedTable, dict[str, Any]]


def small_tables(stored: StoredArrays) -> dict[str, Pair]:
    """The tables that `jax_tt.save_quantized` or `jax_tt.save_coded` wrote, with their states, by name."""
    found: dict[str, Pair] = {}
    for kind, load in _LOADERS.items():
        if kind in stored.notes:
            found |= load(stored.path)
    return found


def array_names(tables: dict[str, Pair]) -> set[str]:
    """Their arrays in the file."""
    return {f"{name}.{key}" for name, (_, state) in tables.items() for key in state}


def words(pair: Pair) -> tuple[str, str]:
    """The kind of a table with its settings, and the type of what it stores most of."""
    table, state = pair
    if isinstance(table, QuantizedTable):
        return f"{table.bits} bits a number", f"int{table.bits}"
    return f"{table.kind}, {in_words(table)}", str(state["codebooks"].dtype)


def measured(original: Any, pair: Pair, progress: Progress) -> tuple[float, dict[float, float]]:
    """The relative error of a table against the dense original, and those of its rows by quantile."""
    return errors(Rows(original), _blocks(*pair, progress))


def _blocks(
    table: Any, state: dict[str, Any], progress: Progress
) -> Iterator[tuple[int, np.ndarray]]:
    size = max(1, _BLOCK // table.features)
    starts = range(0, table.num_embeddings, size)
    step = progress.begin("error", len(starts))
    for start in starts:
        ids = jnp.arange(start, min(start + size, table.num_embeddings))
        rows, _ = lookup_rows(table, state, ids, Lookup(dtype=jnp.float32))
        yield start, np.asarray(rows, np.float64)
        step()
