"""The candidates for a table: dense, tensor trains, low ranks and others of several sizes, with their errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_dtype, as_int, expect, mismatch
from jax_tt._base.host_table import host_table
from jax_tt._base.progress import Progress
from jax_tt._base.rows_of_arrays import row_blocks
from jax_tt._base.threads import as_here
from jax_tt._compress import candidates as small
from jax_tt._compress.candidate import Candidate, estimates
from jax_tt._compress.source import Source
from jax_tt._ids.id_order import IdOrder, OrderedRows
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.table import QuantizedTable
from jax_tt._tt.budget import least_params, predicted_error
from jax_tt._tt.from_dense import tt_from_dense
from jax_tt._tt.shape import TTShape
from jax_tt.order import from_table

DENSE, TENSOR_TRAIN, LOW_RANK = "dense", "tensor train", "low rank"
# Kinds of `compress` that are measured for trained tables on request.
SMALL = ("quantized", "mixed", "product", "additive", "tt_sum")
ROUNDED = ("quantized", "mixed")

_PREDICTED_STEP, _MEASURED_STEP = 2, 4  # by how much candidates differ in size
# Tables of one sixteenth of an even share of the budget are tried, smaller ones not.
_LEAST_SHARE = 16
# Sums of codes that are about as good as others after a quick fit become much better.
_FINER = 12
_BLOCK = 1 << 23  # numbers of a table read at once


class PlanInput:
    """A table to be planned.

    Args:
        name: for messages.
        value: ``(num_embeddings, features)``, or a trained table ``[N, D]`` of floats.
        dtype: storage type, for a table that is not trained.
        seed: of randomised decompositions.
        kinds: some of `SMALL`.

    Attributes:
        sampled: whether tables of the ``kinds`` are tried on a sample of the rows first.
    """

    def __init__(self, name: str, value: Any, dtype: Any, seed: int, kinds: Sequence[str] = ()):
        self.name, self.seed, self.kinds = name, seed, kinds
        self.dense: Any = None
        if hasattr(value, "shape"):
            value = host_table(f"tables[{name!r}]", value)
        if isinstance(value, tuple | list) and len(value) == 2 and not np.ndim(value[0]):
            self.num_embeddings, self.features = (
                as_int(f"tables[{name!r}][{k}]", size) for k, size in enumerate(value)
            )
        elif _is_table(value):
            self.dense = value
            self.num_embeddings, self.features = self.dense.shape
            dtype = self.dense.dtype
        else:
            expected = "(num_embeddings, features) or a trained table [N, D] of floats"
            got = value if hasattr(value, "dtype") else repr(value)[:60]
            raise mismatch(f"tables[{name!r}]", got, expected, error=TypeError)
        if min(self.num_embeddings, self.features) < 1:
            got = f"{self.num_embeddings} x {self.features}"
            raise mismatch(f"tables[{name!r}]", got, "sizes >= 1")
        self.dtype = as_dtype("dtype", dtype, jnp.float32)
        self.itemsize = self.dtype.itemsize
        self.measured = self.dense is not None
        self.dense_bytes = self.num_embeddings * self.features * self.itemsize
        self._order: IdOrder | None = None
        self._fitted: list[Candidate] = []  # tensor trains
        self._tried: set[str] = set()  # labels of tables of `SMALL`
        self.sampled = False
        if self.measured:
            self._source = Source(self.dense, None, jnp.dtype("bfloat16"), seed)
            self._sample = self._source.sample()
            self.sampled = self._sample is not self._source

    @functools.cached_property
    def _tails(self) -> np.ndarray:
        return _low_rank_errors(self.dense, self.name)

    @property
    def least_bytes(self) -> int:
        """A lower bound of the bytes of all candidates, which takes no fit."""
        sizes = [self.dense_bytes, self.least_train_bytes]
        if self.measured:
            sizes += [small.smallest(self._source, kind) for kind in self.kinds]
        return min(sizes)

    @property
    def uncompressed(self) -> Candidate:
        return Candidate(DENSE, "", self.dense_bytes, error=0.0)

    @property
    def least_train_bytes(self) -> int:
        """Bytes of the smallest tensor train."""
        return least_params(self.num_embeddings, self.features) * self.itemsize

    def candidates(self, bar: Progress, budget: int, share: float = 0.0) -> list[Candidate]:
        """Dense, and whatever is smaller and takes at most ``budget`` bytes, or is the smallest train.

        Errors of large trained tables are those of a sample of the rows, but for trains, whose error may depend on how
        rows that are far apart belong together. Such tables have no forms that are much smaller than a ``share`` of the
        dense one, except the smallest train.
        """
        forms = [self.uncompressed]
        floor = share / _LEAST_SHARE * self.dense_bytes if self.sampled else 0
        if self.measured:
            forms += [
                low
                for rank in range(1, self.features + 1)
                if (low := self.low_rank(rank)).nbytes < self.dense_bytes
            ]
            sizes = [(kind, size) for kind in self.kinds for size in self._sizes(kind)]
            forms += self._small(
                bar, [(kind, size) for kind, size in sizes if size >= floor], budget
            )
        forms += self._trains(forms, budget, floor, bar)
        return [one for one in forms if one.kind == DENSE or one.nbytes < self.dense_bytes]

    def low_rank(self, rank: int) -> Candidate:
        """A product ``[N, r] [r, D]``: the train of two cores whose first has all rows, its second all columns."""
        n, width = self.num_embeddings, self.features
        shape = TTShape(n, width, rank, (n, 1), (1, width))
        nbytes = shape.num_params * self.itemsize
        error = float(self._tails[shape.ranks[0]])
        return Candidate(LOW_RANK, "", nbytes, error=error, shape=shape)

    def low_rank_within(self, nbytes: int) -> Candidate | None:
        """The largest rank whose factors take at most this many bytes."""
        rank = nbytes // (self.itemsize * (self.num_embeddings + self.features))
        return None if rank < 1 else self.low_rank(min(rank, self.features))

    def train(self, nbytes: int, ordered: bool = False) -> Candidate:
        """A tensor train of at most this many bytes, including its order if there is one."""
        order = self._rows_order() if ordered else None
        extra = 0 if order is None else order.nbytes
        size = nbytes - extra
        if not self.measured:
            shape = TTShape.for_budget(
                self.num_embeddings, self.features, max_bytes=size, dtype=self.dtype
            )
            sizes = [p * q for p, q in zip(shape.row_factors, shape.col_factors, strict=True)]
            error = predicted_error(sizes, shape.ranks)
        else:
            rows = self.dense if order is None else OrderedRows(self.dense, order)
            train = tt_from_dense(rows, max_bytes=size, seed=self.seed)
            shape, error = train.shape, train.relative_error
        nbytes = extra + shape.num_params * self.itemsize
        detail = "ordered" if ordered else ""
        return Candidate(TENSOR_TRAIN, detail, nbytes, error=error, shape=shape, id_order=order)

    def rival(self, nbytes: int) -> Candidate:
        """A tensor train to compare with: of so many bytes, or the one of a large table that is closest to it."""
        if not self.sampled:
            return self.train(nbytes)
        plain = (one for one in self._fitted if one.id_order is None)
        return min(plain, key=lambda one: abs(math.log(one.nbytes / nbytes)))

    def small_within(self, bar: Progress, kinds: Iterable[str], nbytes: int) -> list[Candidate]:
        """Tables of some of the ``kinds`` that are as large as fits in so many bytes."""
        size = min(nbytes, self.dense_bytes - 1)
        return self._small(bar, [(kind, size) for kind in self.kinds if kind in kinds], size)

    def codes_beside(self, chosen: Candidate) -> set[str]:
        """The ``kinds`` of codes, beside numbers of fewer bits than the most."""
        most = QuantizedTable(self.num_embeddings, self.features, max(codec.BITS)).nbytes
        rounded = chosen.kind in ROUNDED and chosen.nbytes < most
        return {kind for kind in self.kinds if kind in small.OF_SAMPLES} if rounded else set()

    def _small(
        self, bar: Progress, sizes: Iterable[tuple[str, int]], budget: int
    ) -> list[Candidate]:
        """Tables of kinds of `compress` with their sizes, fitted in a few iterations, that were not tried before."""
        every = {
            one.label: one
            for kind, size in sizes
            for one in small.candidates(self._source, kind, size)
            if one.nbytes <= budget and one.label not in self._tried
        }
        self._tried.update(every)
        tables = list(every.values())
        if self.sampled:
            tried = estimates(tables, self._sample, bar, f" of {self.name}")
            return [one for one in tried if one.error < math.inf]
        made = []
        for one in tables:
            # Some kinds do not hold large numbers.
            with bar.stage(f"{self.name} as {one.label}"), contextlib.suppress(ValueError):
                made.append(self.fitted(one))
        return made

    def fitted(self, one: Candidate) -> Candidate:
        """A candidate as measured on all rows, after few iterations at first, and then more."""
        made, _ = one.fitted(self._source, one.quick)
        more = one.quick.get("iterations", _FINER) < _FINER
        return dataclasses.replace(
            made, make=one.make if more else None, quick={"iterations": _FINER}
        )

    def _sizes(self, kind: str) -> list[int]:
        widths = [
            QuantizedTable(self.num_embeddings, self.features, bits).nbytes for bits in codec.BITS
        ]
        if kind == "quantized":
            return widths
        if kind == "mixed":  # between these
            return [(more + less) // 2 for more, less in itertools.pairwise(widths)]
        # Where numbers of 8 bits have room, codes and sums of trains take longest, and numbers have almost no error.
        largest = 2 if "quantized" in self.kinds else 1
        return [self.dense_bytes // _MEASURED_STEP**k for k in range(largest, 5)]

    def _trains(
        self, others: Sequence[Candidate], budget: int, floor: float, bar: Progress
    ) -> list[Candidate]:
        """As the ids come and, for a trained table, ordered by its rows; an order's bytes come on top."""
        step = _MEASURED_STEP if self.measured else _PREDICTED_STEP
        least, size, sizes = self.least_train_bytes, self.dense_bytes // 2, []
        while size > least:
            sizes += [size] if floor <= size <= budget else []
            size //= step
        sizes += [least] if least < self.dense_bytes else []

        def chain(ordered: bool) -> list[Candidate]:
            made: list[Candidate] = []
            more = self._rows_order().nbytes if ordered else 0
            for size in sizes:
                rivals = (one.error for one in others if one.nbytes <= size + more)
                # A smaller train is no better than the one before it.
                bound = made[-1].error if made else 0.0
                if min(rivals, default=math.inf) <= bound and (ordered or size != least):
                    continue
                with bar.stage(f"{self.name} as a tensor train{', ordered' if ordered else ''}"):
                    made.append(self.train(size + more, ordered))
            return made

        orders = (False, True) if self.measured else (False,)
        with ThreadPoolExecutor() as pool:
            self._fitted = list(itertools.chain(*pool.map(as_here(chain), orders)))
        return self._fitted

    def _rows_order(self) -> IdOrder:
        if self._order is None:
            shape = TTShape.suggest(self.num_embeddings, self.features)
            self._order = from_table(self.dense, shape, seed=self.seed, progress=False)
        return self._order


def _low_rank_errors(table: Any, name: str) -> np.ndarray:
    """Relative error of the best product of every rank 0 ... D, from the Gram matrix of the columns in float64."""
    gram = np.zeros((table.shape[1],) * 2)
    for _, rows in row_blocks(table, _BLOCK, np.float64):
        gram += rows.T @ rows
    expect(np.isfinite(gram).all(), f"tables[{name!r}]", "NaN or infinity", "finite numbers")
    values = np.maximum(np.linalg.eigvalsh(gram)[::-1], 0)
    lost = np.append(np.cumsum(values[::-1])[::-1], 0.0)
    return np.sqrt(lost / lost[0]) if lost[0] > 0 else lost


def _is_table(value: Any) -> bool:
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return False
    return len(value.shape) == 2 and jnp.issubdtype(value.dtype, jnp.floating)
