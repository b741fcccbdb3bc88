"""`compress`: the best small table for trained rows."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_dtype, as_int, as_positive, expect, mismatch, one_of, type_of
from jax_tt._base.progress import Progress, text_table
from jax_tt._base.rows_of_arrays import dense_table, exactly_one, row_weights
from jax_tt._compress.candidate import Candidate, estimates
from jax_tt._compress.candidates import KINDS, OF_QUICK, OF_SAMPLES, candidates, smallest
from jax_tt._compress.source import Source, loss
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._table.table import Table

Metric = Callable[[Table, dict[str, jax.Array]], Any]

# How many times smaller than the rows in float32 the tables are that are tried for a quality.
_RATIOS = (128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3)
# So many of the tables for a size are fitted to all rows, and so many of these in all iterations.
_FITTED, _REFINED = 4, 2
# The squared error on the sample, relative to the least one, of tables of further kinds that are fitted to all rows;
# there is more room for codes.
_NEAR = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed:
    """The result of `compress`; ``print`` shows everything that was measured.

    Attributes:
        table, state: the best table and its state.
        chosen: its measurements.
        dense: the measurements of the rows themselves, in float32.
        measured: the measurements of all tables that were tried, smallest first.

    >>> import jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    >>> result = jax_tt.compress(rows, kind="quantized", max_bytes=900, progress=False)
    >>> result.table.bits, result.dense.nbytes
    (4, 3200)
    """

    table: Table
    state: dict[str, jax.Array]
    chosen: Candidate
    dense: Candidate
    measured: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [
            (
                one.kind,
                one.detail + (" *" if one == self.chosen else ""),
                f"{one.nbytes:,}",
                f"{self.dense.nbytes / one.nbytes:.1f}x",
                f"{'~' if one.sampled else ''}{one.error:.3g}",
                ""
                if one.quality == -math.inf
                else f"{'~' if one.sampled else ''}{one.quality:.4g}",
            )
            for one in (*self.measured, self.dense)
        ]
        columns = ("kind", "settings (* chosen)", "bytes", "smaller by", "error", "quality")
        table = text_table(columns, lines, left=2)
        if any(one.sampled for one in self.measured):
            table += (
                "\n~: of a table of a sample of the rows. Compare these with each other only; the worse ones were not "
                "made of all rows."
            )
        return f"{table}\n{loss(self.chosen.error)}".rstrip()

    def draw(self, axis: Any) -> None:
        """Draws quality over bytes, with one line a kind, on an axis of matplotlib."""
        for kind in dict.fromkeys(one.kind for one in self.measured):
            points = [
                (one.nbytes, one.quality)
                for one in self.measured
                if one.kind == kind and one.quality > -math.inf
            ]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", label=kind)
        axis.plot(self.chosen.nbytes, self.chosen.quality, "k*", markersize=14, label="chosen")
        axis.axhline(self.dense.quality, color="k", linestyle=":", label="dense")
        axis.set(xscale="log", xlabel="bytes", ylabel="quality")
        axis.legend()


def compress(
    rows: Any,
    *,
    kind: str | Sequence[str] = "auto",
    max_bytes: int | None = None,
    min_quality: float | None = None,
    metric: Metric | None = None,
    weights: Any = None,
    param_dtype: Any = jnp.bfloat16,
    seed: int = 0,
    progress: bool = True,
) -> Compressed:
    """Compresses trained rows: makes tables of several kinds, measures them, and returns the best.

    With ``max_bytes``, every kind is made as large as fits, and the table with the highest quality is returned. With
    ``min_quality``, the smallest measured table that is at least as good is returned: every kind is measured at a few
    sizes, from 1/128 to 1/3 of the rows in float32, by bisection.

    The settings for a size are tried on a sample of the rows if there are more than 4,096 of them, and variations of
    product codes only if plain ones are not far from the best. The best four, and the best of every further kind that
    is near, are then fitted to all rows in a few iterations, and the best two of these, or three for two kinds, again
    in all iterations. Codes may be further away, as samples are too small for their codebooks and few iterations too
    few.

    The kinds are

    - ``"quantized"``: `QuantizedTable` with 8, 4, 3 or 2 bits, with uniform and with fitted levels, and rotated,
    - ``"mixed"``: rows with different numbers of bits, chosen by `quantize_mixed`, with both kinds of levels,
    - ``"product"`` and ``"additive"``: `CodedTable` with different numbers and lengths of codes; below 3 bits a number
      also with more codes for some rows, if rows are of very different importance,
    - ``"low_rank"``: a `TTTable` of two cores, of which the first has a row for every id,
    - ``"tt"``: a `TTTable` by `tt.from_dense`, for the ids in their order and in that of `order.from_table`,
    - ``"tt_sum"``: a `SumTable` of tensor trains with different orders, by `tt.residuals`, for which all rows have the
      same weight.

    Orders of ids count among the bytes.

    Args:
        rows: ``[N, D]`` of floats, e.g. ``jax_tt.tables.to_dense(table, state)``; may be a memory map, which is read in
            blocks.
        kind: ``"auto"`` for all kinds, one of them, or a sequence of some. Of a large table, ``"tt_sum"`` alone takes
            much longer than the others, as ids are ordered for every train.
        max_bytes: largest size, of everything that lookups need.
        min_quality: smallest quality, in units of ``metric``.
        metric: ``(table, state) -> number``, the larger the better, e.g. recall on held-out data with this table in
            place of the trained one, or `jax_tt.compression.top_k_agreement`. Without it, quality is 1 minus the
            squared error of the rows relative to their squares, with ``weights``.
        weights: importance of every row ``[N]``, at least 0, e.g. the root of its count.
        param_dtype: type of codebooks and cores.
        seed: of the fits.
        progress: show a progress bar, which says what is tried.

    Returns:
        `Compressed`: the table, its state, and the measurements.

    Raises:
        ValueError: not exactly one of ``max_bytes`` and ``min_quality`` is given; no table is that small, or none that
            was measured is that good; or the metric returned NaN.

    >>> import jax_tt, numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(500, 16)).astype(np.float32)
    >>> kinds = ["quantized", "product"]
    >>> result = jax_tt.compress(rows, kind=kinds, max_bytes=rows.nbytes // 5, progress=False)
    >>> result.chosen.nbytes <= rows.nbytes // 5, result.chosen.quality > 0.98
    (True, True)
    """
    exactly_one(max_bytes=max_bytes, min_quality=min_quality)
    rows = dense_table(rows, "rows")
    given = [kind] if isinstance(kind, str) else kind
    kinds = [one_of("kind", one, ("auto", *KINDS)) for one in given]
    kinds = list(KINDS) if "auto" in kinds else kinds
    weights = row_weights(weights, len(rows))
    dtype = as_dtype("param_dtype", param_dtype, jnp.bfloat16)
    source = Source(rows, weights, dtype, as_int("seed", seed))
    if metric is not None and not callable(metric):
        got = type_of(metric)
        raise mismatch("metric", got, "a function (table, state) -> number", error=TypeError)
    with Progress(progress, "compress") as bar:
        search = _Search(source, metric, bar)
        if max_bytes is not None:
            return search.largest(kinds, as_positive("max_bytes", max_bytes))
        return search.smallest(kinds, _quality("min_quality", min_quality))


class _Search:
    """Makes and measures tables, and keeps the best."""

    def __init__(self, source: Source, metric: Metric | None, bar: Progress):
        self._source, self._metric, self._bar = source, metric, bar
        self._sample = source.sample()
        self._estimates: dict[str, Candidate] = {}
        self._made: dict[tuple[str, ...], Candidate] = {}
        self._failed: ValueError | None = None
        self._best: tuple[Any, Candidate, dict[str, jax.Array]] | None = None

    def largest(self, kinds: Iterable[str], max_bytes: int) -> Compressed:
        tables = [one for kind in kinds for one in candidates(self._source, kind, max_bytes)]
        if not tables:
            sizes = ", ".join(f"{kind} {smallest(self._source, kind):,} bytes" for kind in kinds)
            n, features = self._source.sizes
            raise ValueError(
                f"max_bytes: got {max_bytes:,} bytes, but the smallest tables of {n:,} x {features} take: {sizes}. "
                "Expected at least the least of these."
            )
        self._measure(tables, lambda one: one.quality)
        return self._result()

    def smallest(self, kinds: Sequence[str], min_quality: float) -> Compressed:
        def preferred(one: Candidate) -> Any:
            return (1, -one.nbytes, one.quality) if one.quality >= min_quality else (0, one.quality)

        def at(ratio: int, kind: str) -> list[Candidate]:
            return candidates(self._source, kind, self._dense_bytes // ratio)

        def good(ratio: int, kind: str) -> bool:
            return self._measure(at(ratio, kind), preferred) >= min_quality

        def promising(ratio: int, kind: str) -> bool:
            # Only tables of all rows have a metric.
            if self._metric is not None or self._sample is self._source:
                return good(ratio, kind)
            return max(self._estimated(at(ratio, kind)), default=-math.inf) >= min_quality

        first = {
            kind: bisect.bisect_left(_RATIOS, True, key=functools.partial(promising, kind=kind))
            for kind in kinds
        }
        for kind in sorted(first, key=lambda kind: first[kind]):
            for ratio in _RATIOS[first[kind] :]:
                no_better = self._dense_bytes // ratio >= self._least(min_quality)
                if no_better or good(ratio, kind):
                    break
        if self._best is None and self._failed is not None:
            raise self._failed
        if self._least(min_quality) == math.inf:
            tried = [one.quality for one in (*self._made.values(), *self._estimates.values())]
            reached = f"at most {max(tried):.4g}" if tried else "no table"
            raise ValueError(
                f"min_quality: got {min_quality:g}, but {reached} was found at a third of the bytes or less; the rows "
                f"themselves have {self._dense().quality:.4g}. Expected a lower number, or another kind."
            )
        return self._result()

    @property
    def _dense_bytes(self) -> int:
        return 4 * math.prod(self._source.sizes)

    def _least(self, min_quality: float) -> float:
        """Bytes of the best table if it is good enough, else infinity."""
        good = self._best is not None and self._best[1].quality >= min_quality
        return self._best[1].nbytes if self._best is not None and good else math.inf

    def _measure(self, tables: list[Candidate], preferred: Callable[[Candidate], Any]) -> float:
        """Measures the best candidates, and returns the highest quality of them; without any, -inf."""
        if len(tables) > _FITTED and self._sample is not self._source:
            estimates = self._estimated(tables)
            near = functools.partial(_near, max(estimates), OF_SAMPLES)
            tables = leading(tables, estimates, _FITTED, near)
        if len(tables) > _REFINED:
            quick = [self._measured(one, preferred, quick=True).quality for one in tables]
            of_one_kind = len({one.kind for one in leading(tables, quick, _REFINED)}) == 1
            near = functools.partial(_near, max(quick), dict.fromkeys(OF_SAMPLES, OF_QUICK))
            tables = leading(
                tables,
                quick,
                _REFINED,
                lambda one, quality: of_one_kind or (one.kind in OF_SAMPLES and near(one, quality)),
            )[: _REFINED + 1]
        fits = (self._measured(one, preferred, quick=False).quality for one in tables)
        return max(fits, default=-math.inf)

    def _estimated(self, tables: list[Candidate]) -> list[float]:
        """The qualities on the sample."""
        new = [one for one in tables if one.label not in self._estimates]
        for one in estimates(new, self._sample, self._bar):
            # Only tables of all rows have a metric.
            quality = one.quality if self._metric is None else -math.inf
            self._estimates[one.label] = dataclasses.replace(one, quality=quality)
        return [1 - self._estimates[one.label].error ** 2 for one in tables]

    def _measured(
        self, candidate: Candidate, preferred: Callable[[Candidate], Any], *, quick: bool
    ) -> Candidate:
        options = candidate.quick if quick else {}
        key = (candidate.label, *options)
        if key not in self._made:
            with self._bar.stage(f"{candidate.label}{', quickly' if quick else ''}"):
                try:
                    one, state = candidate.fitted(self._source, options)
                except ValueError as error:  # of a kind that does not hold such rows; others may
                    self._failed = error
                    return candidate
                assert one.table is not None
                what = f"{one.kind} with {one.detail}"
                quality = self._quality_of(what, one.table, state, one.quality)
                one = dataclasses.replace(one, quality=quality)
            self._made[key] = one
            if self._best is None or preferred(one) > self._best[0]:
                self._best = preferred(one), one, state
        return self._made[key]

    def _quality_of(
        self, what: str, table: Table, state: dict[str, jax.Array], of_rows: float
    ) -> float:
        if self._metric is None:
            return of_rows
        return _quality(f"metric: for {what}", self._metric(table, state))

    def _dense(self) -> Candidate:
        n, features = self._source.sizes
        if self._metric is None:
            quality = 1.0
        else:
            rows = jnp.asarray(np.asarray(self._source.rows[:]), jnp.float32)
            dense = DenseTable(n, features), {"embedding": rows}
            quality = self._quality_of("dense", *dense, 1.0)
        return Candidate("dense", "float32", self._dense_bytes, error=0.0, quality=quality)

    def _result(self) -> Compressed:
        if self._best is None:
            assert self._failed is not None
            raise self._failed
        _, chosen, state = self._best
        assert chosen.table is not None
        best = {label: one for label, one in self._estimates.items() if one.error < math.inf}
        for one in sorted(self._made.values(), key=lambda one: one.quality):
            best[one.label] = one
        measured = tuple(sorted(best.values(), key=lambda one: one.nbytes))
        return Compressed(chosen.table, state, chosen, self._dense(), measured)


def leading(
    tables: Sequence[Candidate],
    qualities: Sequence[float],
    count: int,
    near: Callable[[Candidate, float], bool] = lambda *_: False,
) -> list[Candidate]:
    """So many of the best tables, and the best one of each further kind whose quality is near.

    How a sample or a few iterations change a quality depends on the kind.
    """
    order = sorted(range(len(tables)), key=lambda k: qualities[k], reverse=True)
    kept = [tables[k] for k in order[:count]]
    for k in order[count:]:
        if near(tables[k], qualities[k]) and tables[k].kind not in {one.kind for one in kept}:
            kept.append(tables[k])
    return kept


def _near(best: float, of_codes: Mapping[str, float], one: Candidate, quality: float) -> bool:
    """Whether a table may become as good as one of the best quality; errors of codes may be so many times as large."""
    more = of_codes[one.kind] ** 2 if one.kind in of_codes else _NEAR
    return 1 - quality <= more * (1 - best)


def _quality(argument: str, value: Any) -> float:
    """A number that is not NaN."""
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "iufb":
        what = f"{array.dtype} of shape {array.shape}" if array.ndim else repr(value)
        raise TypeError(f"{argument}: got {what}; expected one number.")
    expect(not np.isnan(array), argument, "NaN", "a number, the larger the better")
    return float(array)
