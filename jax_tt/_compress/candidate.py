"""`Candidate`: a form of a table, which `compress` and `plan` make, measure and compare."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jax_tt._base.progress import Progress
from jax_tt._base.threads import as_here, one_blas_thread
from jax_tt._compress.source import Made, Source, explained
from jax_tt._ids.id_order import IdOrder
from jax_tt._table.table import Table
from jax_tt._tt.shape import TTShape

_THREADS = 4
# The squared error of a variation is not smaller than that of the plain table by more than this factor.
_MOST_GAIN = 32


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A form of a table, and what was measured of it.

    Attributes:
        kind: ``"dense"``, one of the kinds of `compress`, or of the kinds that only `plan` has.
        detail: its settings, in words. No two tables of a kind have the same.
        nbytes: all bytes of its state; before a table of all rows is made, the most that it takes.
        error: the root of the weighted squared error relative to the squares of the rows, measured or predicted;
            infinity before that.
        quality: the metric of `compress`, of a table of a sample minus infinity; without a metric, ``1 - error**2``.
        sampled: whether ``error`` and ``quality`` are of a table of a sample of the rows.

    >>> import jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    >>> jax_tt.compress(rows, kind="quantized", max_bytes=900, progress=False).chosen.nbytes
    800
    """

    kind: str
    detail: str
    nbytes: int
    # Makes the table, with its state, of the rows of a source, which may be a sample: the table then has its share of
    # the bytes. None if there is nothing to make, or no better way to make it.
    make: Callable[..., Made] | None = dataclasses.field(default=None, compare=False, repr=False)
    # Arguments of `make` with which it takes a fraction of the time and the table is a little worse.
    quick: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    # A table of the same kind and size that is made in a fraction of the time, if this is a variation of it.
    plain: Candidate | None = dataclasses.field(default=None, compare=False, repr=False)
    error: float = math.inf
    quality: float = -math.inf
    sampled: bool = False
    # The error of the table of a sample, which is kept when all rows are measured.
    of_sample: float | None = dataclasses.field(default=None, compare=False, repr=False)
    # The table, once it is made; of a train that `plan` tries, shape and order of its ids instead.
    table: Table | None = dataclasses.field(default=None, compare=False, repr=False)
    shape: TTShape | None = dataclasses.field(default=None, compare=False, repr=False)
    id_order: IdOrder | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        return f"{self.kind}, {self.detail}" if self.detail else self.kind

    def fitted(
        self, source: Source, options: Mapping[str, Any]
    ) -> tuple[Candidate, dict[str, jax.Array]]:
        """The candidate as measured on the rows of a source, and the state of its table.

        Raises:
            ValueError: the kind does not hold such rows, or has no table for so few of them.
        """
        assert self.make is not None
        table, state = self.make(source, **options)
        quality = explained(source, table, state)
        error = math.sqrt(max(0.0, 1.0 - quality)) if quality > -math.inf else math.inf
        found = dataclasses.replace(self, table=table, error=error, quality=quality)
        if source.whole is not None:
            return dataclasses.replace(found, sampled=True, of_sample=error), state
        nbytes = sum(array.nbytes for array in state.values())
        return dataclasses.replace(found, nbytes=nbytes, sampled=False), state


def estimates(
    candidates: Sequence[Candidate], sample: Source, bar: Progress, label: str = ""
) -> list[Candidate]:
    """The candidates as measured by quick tables of a sample of the rows.

    The error is infinite if a kind has no table for so few rows, and of variations of plain tables that are far from
    the best, which are not tried.
    """
    found = {one.label: dataclasses.replace(one, sampled=True) for one in candidates}

    def estimate(candidate: Candidate) -> None:
        stage = bar.stage(f"a sample{label} as {candidate.label}")
        with stage, contextlib.suppress(ValueError):
            found[candidate.label], _ = candidate.fitted(sample, candidate.quick)

    def promising(candidate: Candidate) -> bool:
        assert candidate.plain is not None
        rivals = (found[one.label].error for one in plain if one.nbytes <= candidate.nbytes)
        best = min(rivals, default=math.inf)
        return found[candidate.plain.label].error ** 2 <= _MOST_GAIN * best**2

    labels = {one.label for one in candidates}
    of_others = [one.plain is not None and one.plain.label in labels for one in candidates]
    plain = [one for one, varied in zip(candidates, of_others, strict=True) if not varied]
    variations = [one for one, varied in zip(candidates, of_others, strict=True) if varied]
    with one_blas_thread(), ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(as_here(estimate), plain))
        list(pool.map(as_here(estimate), filter(promising, variations)))
    return [found[one.label] for one in candidates]


Found = Iterator[Candidate]
