"""What an opened table of candidates is made of and gives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_tt._compress.encode import weighted_squares
from jax_tt._table.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What tables are made of.

    Attributes:
        rows: ``[N, D]`` on the host.
        weights: importance of every row ``[N]``, or None.
        param_dtype: type of codebooks and cores.
        seed: of fits.
    """

    rows: Any
    weights: np.ndarray | None
    param_dtype: Any
    seed: int

    @property
    def sizes(self) -> tuple[int, int]:
        n, features = self.rows.shape
        return int(n), int(features)

    @functools.cached_property
    def concentration(self) -> float:
        """The share of the quarter of rows with the largest weighted squares in the sum of these."""
        squares = np.sort(weighted_squares(self.rows, self.weights))[::-1]
        return float(squares[: -(-len(squares) // 4)].sum() / max(squares.sum(), 1e-30))


Made = tuple[Table, dict[str, jax.Array]]
Found = Iterator[tuple[str, Callable[..., Made], dict[str, int]]]
