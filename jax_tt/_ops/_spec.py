"""Static description of a table, hashable, shared by the reference and the native ops."""

import dataclasses
import math
from typing import Any

from jax import lax

BOUNDS = ("error", "warn", "clip", "zero", "unchecked")
# Ids out of range that contribute nothing, train nothing and touch nothing.
IGNORED = ("warn", "zero")


@dataclasses.dataclass(frozen=True)
class TTSpec:
    """A tensor-train table: ``ranks`` has ``d + 1`` entries, the outer ones 1.

    ``precision`` is that of its products, as `resolve_precision` returns it.
    """

    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    num_embeddings: int
    bounds: str
    padded: bool
    name: str | None
    precision: Any = lax.Precision.HIGHEST

    @property
    def d(self) -> int:
        return len(self.row_factors)

    @property
    def features(self) -> int:
        return math.prod(self.col_factors)


@dataclasses.dataclass(frozen=True)
class DenseSpec:
    """A dense table ``[num_embeddings, features]``."""

    num_embeddings: int
    features: int
    bounds: str
    padded: bool
    name: str | None

    @property
    def d(self) -> int:
        return 1

    @property
    def row_factors(self) -> tuple[int, ...]:
        # A dense table is a train of one core, so that digits and bounds are computed by the same code.
        return (self.num_embeddings,)


Spec = TTSpec | DenseSpec
