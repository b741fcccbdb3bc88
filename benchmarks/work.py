"""The work that all contenders do: a table, batches of bags of ids, and the gradient of the output."""

import dataclasses
import functools

import numpy as np

from benchmarks.ids import batches
from jax_tt import TTShape

LEARNING_RATE = 0.05

# 512 bags of 20 ids from 11 million rows: the batch that TT-Rec's kernels were published with.
HEADLINE_SHAPE = TTShape(11_000_000, 64, (32, 32), (200, 220, 250), (4, 4, 4))
HEADLINE_BAGS, HEADLINE_BAG_SIZE = 512, 20


@dataclasses.dataclass(frozen=True)
class Work:
    """Sum-pooled bags over one table. Dense contenders use only its rows and columns."""

    shape: TTShape
    bags: int
    bag_size: int
    batches: list[np.ndarray]

    @classmethod
    def make(cls, shape: TTShape, bags: int, bag_size: int, stream: str = "uniform") -> "Work":
        ids = batches(stream, shape.num_embeddings, bags * bag_size)
        return cls(shape, bags, bag_size, ids)

    @classmethod
    def headline(cls, stream: str = "uniform", *, quick: bool = False) -> "Work":
        """The headline batch; with ``quick`` a table and batch small enough for a test."""
        if quick:
            return cls.make(TTShape.suggest(10_000, 16, ranks=8), 16, 4, stream)
        return cls.make(HEADLINE_SHAPE, HEADLINE_BAGS, HEADLINE_BAG_SIZE, stream)

    @property
    def nnz(self) -> int:
        """Lookups in one batch."""
        return self.bags * self.bag_size

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Where each bag starts, and where the last one ends."""
        return np.arange(0, self.nnz + 1, self.bag_size)

    @functools.cached_property
    def gradient(self) -> np.ndarray:
        """The gradient of the loss with respect to the bags, ``[bags, features]``.

        Its entries are small and have random signs, so that the frequent slices of a Zipf stream do not diverge.
        """
        rng = np.random.default_rng(2)
        return 1e-3 * rng.standard_normal((self.bags, self.shape.features), np.float32)

    @property
    def step_flops(self) -> int:
        """Flops of forward and backward when every lookup is contracted separately."""
        cost = self.shape.cost(self.nnz)
        return cost.flops_forward + cost.flops_backward
