"""A progress bar for passes over large tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jax_tt._algebra.unfolding import Progress


def silent(label: str, blocks: int) -> Any:
    """Shows nothing."""
    del label, blocks
    return lambda: None


@contextlib.contextmanager
def progress_bar(wanted: bool) -> Iterator[Progress]:
    """One bar of tqdm for all passes, to which every pass adds its blocks."""
    if not wanted:
        yield silent
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "progress: the bar needs tqdm: pip install tqdm, or pass progress=False."
        ) from error
    with tqdm(total=0, unit="block") as bar:

        def begin(label: str, blocks: int) -> Any:
            bar.set_description(label)
            bar.total += blocks
            return bar.update

        yield begin
