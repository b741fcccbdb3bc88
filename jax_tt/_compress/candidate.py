"""`Candidate`: a table that can be made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from jax_tt._base.progress import Progress
from jax_tt._compress.source import Made, Source, explained

_THREADS = 4


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
    """

    kind: str
    detail: str
    nbytes: int
    make: Callable[..., Made]
    quick: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.kind}, {self.detail}"

    def of(self, source: Source, *, quick: bool) -> Made:
        return self.make(source, **(self.quick if quick else {}))


def estimates(
    candidates: Sequence[Candidate], sample: Source, bar: Progress, label: str = ""
) -> list[float]:
    """The quality of a quick table of a sample of the rows for each; -inf if there is none with so few rows."""

    def estimated(candidate: Candidate) -> float:
        with bar.stage(f"a sample{label} as {candidate.label}"):
            try:
                return explained(sample, *candidate.of(sample, quick=True))
            except ValueError:
                return -math.inf

    # Most of the time, one core compiles a program.
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(estimated, candidates))


Found = Iterator[Candidate]
