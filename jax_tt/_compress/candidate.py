"""`Candidate`: a table that can be made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jax_tt._base.blas import one_blas_thread
from jax_tt._base.progress import Progress
from jax_tt._compress.source import Made, Source, explained
from jax_tt._jax.threads import as_here

_THREADS = 4
# The squared error of a variation is not smaller than that of the plain table by more than this factor.
_MOST_GAIN = 32


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A table that can be made.

    Attributes:
        kind: one of the kinds of `compress`.
        detail: its settings, in words. No two tables of a kind have the same.
        nbytes: the most bytes that the table of all rows takes.
        make: makes it, with its state, of the rows of a source, which may be a sample: the table then has its share of
            the bytes.
        quick: arguments of ``make`` with which it takes a fraction of the time and the table is a little worse; none if
            there is no such way.
        plain: a table of the same kind and size that is made in a fraction of the time, if this is a variation of it.
    """

    kind: str
    detail: str
    nbytes: int
    make: Callable[..., Made]
    quick: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plain: Candidate | None = None

    @property
    def label(self) -> str:
        return f"{self.kind}, {self.detail}"

    def of(self, source: Source, *, quick: bool) -> Made:
        return self.make(source, **(self.quick if quick else {}))


def estimates(
    candidates: Sequence[Candidate], sample: Source, bar: Progress, label: str = ""
) -> list[float]:
    """The quality of a quick table of a sample of the rows for each; -inf if there is none with so few rows.

    Variations of plain tables that are far from the best are not tried, which is -inf, too.
    """
    found: dict[str, float] = {}

    def estimate(candidate: Candidate) -> None:
        with bar.stage(f"a sample{label} as {candidate.label}"):
            try:
                quality = explained(sample, *candidate.of(sample, quick=True))
            except ValueError:
                quality = -math.inf
        found[candidate.label] = quality

    def promising(candidate: Candidate) -> bool:
        assert candidate.plain is not None
        rivals = (found[one.label] for one in plain if one.nbytes <= candidate.nbytes)
        return 1 - found[candidate.plain.label] <= _MOST_GAIN * (1 - max(rivals, default=-math.inf))

    labels = {one.label for one in candidates}
    of_others = [one.plain is not None and one.plain.label in labels for one in candidates]
    plain = [one for one, varied in zip(candidates, of_others, strict=True) if not varied]
    variations = [one for one, varied in zip(candidates, of_others, strict=True) if varied]
    with one_blas_thread(), ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(as_here(estimate), plain))
        list(pool.map(as_here(estimate), filter(promising, variations)))
    return [found.get(one.label, -math.inf) for one in candidates]


Found = Iterator[Candidate]
