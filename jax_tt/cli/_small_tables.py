"""The quantized, mixed and coded tables of a file, as ``jax-tt info`` lists them."""

from __future__ import annotations

from typing import Any

from jax_tt._files.coded import load_coded
from jax_tt._files.mixed import load_mixed
from jax_tt._files.quantized import load_quantized
from jax_tt._formats.stored import StoredArrays
from jax_tt._kinds.coded import words as coded
from jax_tt._kinds.coded.table import CodedTable
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.quantized import words as quantized
from jax_tt._kinds.quantized.table import QuantizedTable

_LOADERS = {"quantized": load_quantized, "mixed": load_mixed, "coded": load_coded}

Pair = tuple[QuantizedTable | MixedTable | CodedTable, dict[str, Any]]


def small_tables(stored: StoredArrays) -> dict[str, Pair]:
    """The tables that `jax_tt.save_quantized` and its like wrote, with their states, by name."""
    found: dict[str, Pair] = {}
    for kind, load in _LOADERS.items():
        if kind in stored.notes:
            found |= load(stored.path)
    return found


def array_names(tables: dict[str, Pair]) -> set[str]:
    """Their arrays in the file."""
    return {f"{name}.{key}" for name, (_, state) in tables.items() for key in state}


def words(pair: Pair) -> tuple[str, str]:
    """The kind of a table with its settings, and the type of its numbers: those of the codebooks, if it has some."""
    table, state = pair
    if isinstance(table, QuantizedTable):
        return quantized.in_words(table), f"int{table.bits}"
    if isinstance(table, MixedTable):
        own = [f"{one.bits} bits in {one.num_embeddings:,}" for one in table.tables]
        return f"{', '.join(own)} rows", "int" + "/".join(str(one.bits) for one in table.tables)
    return f"{table.kind}, {coded.in_words(table)}", str(table.storage(state))
