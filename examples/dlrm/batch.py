"""The interface between sources of click data and the training loop."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

NUM_DENSE = 13  # Criteo's number of numeric columns; the synthetic log has as many


class Batch(NamedTuple):
    """One batch of a click log, on the host."""

    dense: np.ndarray  # float32 [B, NUM_DENSE]
    ids: np.ndarray  # int32   [B, L]; the columns of a table are neighbours
    label: np.ndarray  # float32 [B], 1 = clicked


# Where a stream stands, as plain integers: it goes into the checkpoint, and `stream` continues from
# it.
Position = tuple[int, ...]


class ClickData(Protocol):
    """A click log that can be read from any position."""

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        ...

    @property
    def start(self) -> Position:
        """The position of the first batch."""
        ...

    def stream(self, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Training batches from `position` on, each with the position that follows it."""
        ...

    def evaluation(self, position: Position) -> Iterator[Batch]:
        """Held-out examples when training stands at `position`: none was trained on before."""
        ...

    def best_scores(self, batch: Batch) -> np.ndarray | None:
        """The scores [B] that no model can beat, where they are known."""
        ...
