"""A batch of a stream, which does not say where it comes from."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np


class Clicks(NamedTuple):
    """Items that were shown to users.

    Attributes:
        ids: uint64 [B] of the features "user" and "item".
        labels: float32 [B], 1 for a click.
        best: float [B], the planted log-odds of a click, by which the AUC is the best there is; None if unknown.
    """

    ids: dict[str, np.ndarray]
    labels: np.ndarray
    best: np.ndarray | None


class Stream(Protocol):
    """Batches in the order of time."""

    @property
    def steps(self) -> int:
        """Number of batches."""
        ...

    def batches(self, first: int = 0) -> Iterator[Clicks]:
        """The batches from this number on."""
        ...
