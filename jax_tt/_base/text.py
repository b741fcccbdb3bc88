"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(columns: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines under a heading, the first ``left`` columns aligned to the left, the others to the right."""
    widths = [max(map(len, cells)) for cells in zip(columns, *lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join(map(line, (columns, *lines)))
