"""The settings of a quantized table in words."""

from __future__ import annotations

from jax_tt._kinds.quantized.table import QuantizedTable


def in_words(table: QuantizedTable) -> str:
    """All but the sizes of its rows."""
    levels = "" if table.levels is None else ", non-uniform levels"
    turned = ", rotated" if table.rotated else ""
    return f"{table.bits} bits a number{levels}{turned}"
