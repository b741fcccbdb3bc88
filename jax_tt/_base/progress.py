"""What long operations and plans print: progress bars and tables of text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

from tqdm import tqdm


class Progress:
    """A tqdm bar, or nothing where it is not ``shown``. Only work of more than a second gets one by default.

    ``total`` is the number of steps as far as it is known; `begin` adds more. ``options`` are arguments of tqdm.
    """

    def __init__(self, shown: bool, label: str = "", total: int = 0, **options: Any):
        self._bar: Any = None
        self._stopped = False
        if shown:
            self._bar = tqdm(**{"total": total, "desc": label, "delay": 1.0} | options)

    def begin(self, label: str, steps: int) -> Callable[[], object]:
        """Adds a pass of this many steps; returns the function to call after each of them."""
        if self._bar is not None:
            self._bar.set_description(label)
            self._bar.total += steps
        return self.step

    @contextlib.contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """A step with a label, which is shown while it runs; `CancelledError` after `stop`."""
        if self._stopped:
            raise CancelledError
        step = self.begin(label, 1)
        yield
        step()

    def step(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def stop(self) -> None:
        """Lets no stage begin any more, so that threads end soon whose results nobody will use."""
        self._stopped = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


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
