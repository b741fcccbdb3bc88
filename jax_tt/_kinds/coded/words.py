"""The settings of a coded table in words."""

from __future__ import annotations

from jax_tt._kinds.coded.table import CodedTable


def in_words(table: CodedTable) -> str:
    """All but the kind and the sizes of its rows."""
    sums = "" if table.terms == 1 else f", sums of {table.terms}"
    more = f", {table.hot_terms} more in each sum of {table.hot:,} rows" if table.hot else ""
    turned = ", rotated" if table.rotated else ""
    ranks = () if table.codebook_shape is None else table.codebook_shape.ranks
    train = f", codebooks of ranks {', '.join(map(str, ranks))}" if ranks else ""
    return f"{table.num_codes} codes of {table.bits} bits{sums}{more}{turned}{train}"
