"""Progress bars for long operations, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqdm import tqdm


class Progress:
    """A tqdm bar.

    Args:
        shown: whether there is a bar at all.
        label: what it stands for.
        total: steps, as far as they are known; `begin` adds more.
        options: of tqdm. Without a ``delay`` only work that takes longer than a second gets a bar.
    """

    def __init__(self, shown: bool, label: str = "", total: int = 0, **options: Any):
        self._bar: Any = None
        if shown:
            self._bar = tqdm(**{"total": total, "desc": label, "delay": 1.0} | options)

    def begin(self, label: str, steps: int) -> Callable[[], object]:
        """Adds a pass of this many steps; returns the function to call after each of them."""
        if self._bar is not None:
            self._bar.set_description(label)
            self._bar.total += steps
        return self.step

    def step(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
