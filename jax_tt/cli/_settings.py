"""Settings of tables as ``jax-tt info`` lists them."""

from __future__ import annotations

import functools
from typing import Any

from jax_tt._kinds.coded.table import CodedTable, in_words
from jax_tt._kinds.composite.mixed import MixedTable
from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._table.types import State


@functools.singledispatch
def settings(table: Any, state: State) -> tuple[str, str]:
    """The kind of a table with its settings, and the type of its numbers or codebooks."""
    raise NotImplementedError(f"settings of a {type(table).__name__}")


@settings.register
def _(table: QuantizedTable, state: State) -> tuple[str, str]:
    del state
    levels = "" if table.levels is None else ", non-uniform levels"
    rotated = ", rotated" if table.rotated else ""
    return f"{table.bits} bits a number{levels}{rotated}", f"int{table.bits}"


@settings.register
def _(table: MixedTable, state: State) -> tuple[str, str]:
    del state
    parts = [f"{part.bits} bits in {part.num_embeddings:,}" for part in table.tables]
    return f"{', '.join(parts)} rows", "int" + "/".join(str(part.bits) for part in table.tables)


@settings.register
def _(table: CodedTable, state: State) -> tuple[str, str]:
    return f"{table.kind}, {in_words(table)}", str(table.spec.storage(state))
