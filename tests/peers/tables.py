"""Tables, features and batches in a form that both jax_tt and FBGEMM can be given."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LONGEST_BAG = 4


class Tables(NamedTuple):
    """Tables, and the features that are looked up in them.

    Attributes:
        sizes: rows and columns of every table; FBGEMM needs columns that are a multiple of 4.
        of_features: the number of the table of every feature.
        combiner: of all features, since FBGEMM has one for all.
    """

    sizes: tuple[tuple[int, int], ...] = ((23, 4), (11, 8), (40, 12))
    of_features: tuple[int, ...] = (0, 1, 0, 2)
    combiner: str | None = "sum"

    @property
    def keys(self) -> list[str]:
        """Names of the features."""
        return [f"f{k}" for k in range(len(self.of_features))]

    @property
    def columns(self) -> list[int]:
        """Columns of every feature."""
        return [self.sizes[table][1] for table in self.of_features]

    def values(self, dtype: type = np.float32) -> list[np.ndarray]:
        """Values of all tables."""
        rng = np.random.default_rng(1)
        return [rng.normal(size=size).astype(dtype) for size in self.sizes]


# FBGEMM on the CPU refuses ids in range of sequences and of 16-bit types, unless features that share a table are
# neighbours. Its sequences have one width.
NEIGHBOURS = Tables(of_features=(0, 0, 1, 2))
SEQUENCES = Tables(((23, 8), (11, 8)), (0, 0, 1), None)


class Batch(NamedTuple):
    """The bags of all features, feature by feature, as FBGEMM takes them.

    Attributes:
        ids: ``[n]``.
        offsets: ``[sum of sizes + 1]``.
        weights: float32 ``[n]``, or None.
        sizes: number of bags of every feature.
    """

    ids: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None
    sizes: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """The largest number of ids of a random batch with these sizes."""
        return sum(self.sizes) * LONGEST_BAG

    @property
    def lengths_of_features(self) -> list[int]:
        """Number of ids of every feature."""
        ends = self.offsets[np.cumsum((0, *self.sizes))]
        return np.diff(ends).tolist()


def random_batch(
    tables: Tables,
    seed: int,
    sizes: tuple[int, ...] = (),
    *,
    dtype: type = np.int32,
    weighted: bool = False,
) -> Batch:
    """Bags of 0 to 4 ids, some of them empty and many ids more than once, inside features and across them."""
    rng = np.random.default_rng(seed)
    sizes = sizes or (6,) * len(tables.of_features)
    lengths = rng.integers(0, LONGEST_BAG + 1, sum(sizes))
    rows = np.repeat([tables.sizes[table][0] for table in tables.of_features], sizes)
    # Half of the ids are among the first three rows.
    bound = np.repeat(rows, lengths)
    bound = np.where(rng.random(len(bound)) < 0.5, 3, bound)
    ids = rng.integers(0, bound).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)
    weights = rng.normal(size=len(ids)).astype(np.float32) if weighted else None
    return Batch(ids, offsets, weights, sizes)


def batch_without_ids(tables: Tables) -> Batch:
    """Four empty bags for every feature."""
    sizes = (4,) * len(tables.of_features)
    return Batch(np.zeros(0, np.int32), np.zeros(sum(sizes) + 1, np.int32), None, sizes)


def goal(feature: int) -> float:
    """What the loss of all tests pulls the results of a feature to, ``sum((result - goal)**2) / 2``."""
    return 0.25 * (feature + 1)


def assert_close(
    got: Sequence[np.ndarray], want: Sequence[np.ndarray], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Asserts that arrays, one per feature or table, are equal in types and shapes and close in values."""
    for k, (own, peer) in enumerate(zip(got, want, strict=True)):
        assert (own.dtype, own.shape) == (peer.dtype, peer.shape)
        np.testing.assert_allclose(own, peer, rtol, atol, err_msg=f"number {k}")
