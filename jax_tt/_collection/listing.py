"""`listing`: the tables of a collection in a few lines."""

from __future__ import annotations

from collections.abc import Mapping

from jax_tt._base.progress import text_table
from jax_tt._table.table import Table
from jax_tt._table.wrapper import kind_in_words

_COLUMNS = ("table", "kind", "optimizer", "rows", "columns", "bytes", "optimizer bytes")


def listing(tables: Mapping[str, Table], sizes: Mapping[str, tuple[int, int]]) -> str:
    """A line for each table, with its bytes and those of its optimizer state, and one for all of them.

    ``sizes`` has an entry more than ``tables`` if they share scalars, which have a line too.
    """
    lines = [
        (
            name,
            kind_in_words(table),
            "" if table.update is None else type(table.update.optimizer).__name__,
            f"{table.num_embeddings:,}",
            f"{table.features:,}",
            *(f"{size:,}" for size in sizes[name]),
        )
        for name, table in tables.items()
    ]
    lines += [
        ("(shared)", "", "", "", "", *(f"{size:,}" for size in of))
        for name, of in sizes.items()
        if name not in tables
    ]
    totals = (f"{sum(of):,}" for of in zip(*sizes.values(), strict=True))
    lines.append(("all", "", "", "", "", *totals))
    return text_table(_COLUMNS, lines, left=3)
