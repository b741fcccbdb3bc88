"""Progress bars, shown only for work that takes longer than a second."""

from __future__ import annotations

from typing import Any

from jax_tt._requires import require


class Progress:
    """A bar over a known number of steps, or nothing."""

    def __init__(self, label: str, total: int, shown: bool):
        self._bar: Any = None
        if shown:
            tqdm = require("tqdm", "progress=True (progress=False does without)", "order")
            self._bar = tqdm.tqdm(total=total, desc=label, delay=1.0)

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
