"""`plan`: fits tables into a given number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax.numpy as jnp

from jax_tt._base.arguments import as_dtype, as_int, mismatch, one_of
from jax_tt._base.progress import Progress
from jax_tt._base.threads import as_here, one_blas_thread
from jax_tt._compress.candidate import Candidate
from jax_tt._compress.candidates import OF_QUICK, OF_SAMPLES
from jax_tt._compress.source import loss
from jax_tt._directories.row_cache import RowCache
from jax_tt._planning.bandwidths import Bandwidths
from jax_tt._planning.caches import Demand, cache_within, demand, hits_of
from jax_tt._planning.candidates import (
    DENSE,
    LOW_RANK,
    ROUNDED,
    SMALL,
    TENSOR_TRAIN,
    PlanInput,
)
from jax_tt._planning.placements import plan_placements
from jax_tt._planning.table_plan import PlannedTable, TablePlan
from jax_tt._table.options import Update
from jax_tt.optimizers import Optimizer

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")

# Each has a table, and copies of it, in memory.
_THREADS = 2
_CACHES = 5  # the part of the budget that caches may have: one of so many
_WORTH = 0.05  # of the bytes of a table, for which larger ones are tried
_NEAR = 2.0  # times the error of what is chosen, of kinds that larger tables are tried of
_ABOUT = 1.4  # times the error of what is chosen, of other kinds that are measured on all rows
_ABOUT_ROUNDED = (
    1.1  # the same for rounded numbers, whose errors on a sample are almost those of all rows
)


def plan(
    tables: Mapping[str, Any],
    budget_bytes: int | None = None,
    id_samples: Mapping[str, Any] | None = None,
    *,
    dtype: Any = jnp.float32,
    seed: int = 0,
    progress: bool = False,
    devices: int | None = None,
    steps: int = 1,
    optimizer: Optimizer | None = None,
    device_bytes: int | None = None,
    bandwidths: Bandwidths | None = None,
    kinds: Sequence[str] | None = None,
) -> TablePlan:
    """Chooses for every table whether it is dense, a tensor train or a low-rank product, and of what size.

    Trained tables may also become tables of other kinds of `compress`.

    The sum over the tables of the squared relative errors is minimised, with the same weight for every table. All
    tables start with their smallest candidate. Bytes then go, step by step, where they reduce that sum most, up to the
    dense table, which has no error: small tables become dense first. Remaining bytes go to the tables with the largest
    errors.

    The error of a trained table is *measured*: `tt.from_dense` compresses it to several sizes, each a quarter of the
    previous one, with its ids in the given order and ordered by its rows (`order.from_table`, whose 2 to 4 bytes per id
    are included). A size is left out if another candidate that is no larger has a smaller error than the previous size.
    Further candidates are the products ``[N, r] [r, D]`` of all ranks, which are better if the columns are similar and
    the rows are not, and tables of the ``kinds`` of `compress`. If a table has more than 4,096 rows, these are tried on
    a sample of them, and measured on all rows once they would be chosen, and so is the best of every other kind that is
    about as good, until all that is chosen is measured; candidates that are much smaller than an even share of the
    budget are left out. If many bytes remain, larger tables of the kinds that were near are tried. Where rounded rows
    would be chosen, codes of about as many bytes are fitted to all rows, as a sample is too small for their codebooks.
    If only the sizes of a table are known, its error is *predicted* by the model of `TTShape.for_budget`, which is only
    suitable for a first division; the order of its ids is not changed.

    With a sample of ids, a tensor train gets a `RowCache` up to the knee of the miss-ratio curve of the sample, if the
    most frequent rows of the first half of the sample cover a fifth of the lookups of the second half, and twice their
    share of the rows. All caches together take at most a fifth of the budget.

    With a number of devices, the tables of the plan are then placed on them by `plan_placements`: dense tables are
    sharded, and tensor trains are replicated.

    Args:
        tables: name -> ``(num_embeddings, features)``, or a trained table ``[N, D]`` of floats.
        budget_bytes: for all tables, orders and caches together, without optimizer state; may only be left out with
            ``devices``, and all tables are then dense.
        id_samples: name -> integers of any shape, in the order of their requests; negative ones are padding.
        dtype: storage type of untrained tables.
        seed: of randomised decompositions.
        progress: show a progress bar, which says what is tried.
        devices: number of devices of the mesh axis to shard the tables over.
        steps, device_bytes, bandwidths: of `plan_placements`, for ``devices``. The samples of ids are then whole
            batches.
        optimizer: whose state is beside the rows on these devices.
        kinds: for trained tables, some of ``"quantized"``, ``"mixed"``, ``"product"``, ``"additive"`` and ``"tt_sum"``;
            None for all of them, and ``()`` for none. Fits are quick ones; `compress` with the planned kind and bytes
            makes the table.

    Returns:
        `TablePlan`; with ``devices``, its ``placements`` are a `DevicePlan`.

    Raises:
        ValueError: the smallest candidates of the tables exceed the budget, or an argument is invalid.
        TypeError: a table is neither a pair of sizes nor an array.

    >>> import jax_tt
    >>> plan = jax_tt.plan({"items": (1_000_000, 64), "shops": (30_000, 16), "days": (7, 16)}, 4_000_000)
    >>> [planned.kind for planned in plan.values()]
    ['tensor train', 'dense', 'dense']
    """
    if not isinstance(tables, Mapping) or not tables:
        expected = "a dict from names to (num_embeddings, features) or tables"
        raise mismatch("tables", repr(tables), expected, error=TypeError)
    dtype = as_dtype("dtype", dtype, jnp.float32)
    if isinstance(kinds, str):
        raise TypeError(f"kinds: got {kinds!r}; expected a sequence of kinds, such as [{kinds!r}].")
    kinds = [one_of("kinds", kind, SMALL) for kind in (SMALL if kinds is None else kinds)]
    samples = dict(id_samples or {})
    if unknown := sorted(set(samples) - set(tables)):
        raise ValueError(f"id_samples: got {unknown[0]!r}; expected names of tables.")
    specs = {
        name: PlanInput(name, value, dtype, as_int("seed", seed), kinds)
        for name, value in tables.items()
    }
    budget = _budget(budget_bytes, specs, devices)
    _check_budget(budget, sum(table.least_bytes for table in specs.values()))
    demands = {
        name: demand(name, ids, specs[name].num_embeddings, specs[name].features, specs[name].dtype)
        for name, ids in samples.items()
        if budget_bytes is not None
    }
    share = budget / sum(table.dense_bytes for table in specs.values())
    with Progress(progress, "plan", leave=False) as bar, one_blas_thread():

        def forms(table: PlanInput) -> list[Candidate]:
            if budget_bytes is None:
                return [table.uncompressed]
            return table.candidates(bar, budget_bytes, share)

        candidates = dict(zip(specs, _together(bar, forms, specs.values()), strict=True))
        least = sum(min(one.nbytes for one in some) for some in candidates.values())
        _check_budget(budget, least)
        wanted_bytes = sum(wanted.nbytes for wanted in demands.values())
        reserve = min(budget // _CACHES, wanted_bytes, budget - least)
        chosen = _measured(specs, candidates, budget - reserve, bar)
        if _fill(specs, candidates, chosen, budget - reserve, bar):
            chosen = _measured(specs, candidates, budget - reserve, bar)
        caches = _caches(specs, chosen, demands, reserve)
        left = budget - sum(one.nbytes for one in chosen.values())
        left -= sum(taken for _, taken in caches.values())
        _spend(specs, chosen, left)
        planned = {}
        for name, table in specs.items():
            with bar.stage(f"{name} beside other forms"):
                demanded = caches.get(name), demands.get(name)
                planned[name] = _planned(table, chosen[name], *demanded, budget)
    if devices is None:
        return TablePlan(planned, budget)
    update = None if optimizer is None else Update(optimizer)
    described = {name: one.table(update=update) for name, one in planned.items()}
    limits = {"steps": steps, "device_bytes": device_bytes, "bandwidths": bandwidths}
    return TablePlan(planned, budget, plan_placements(described, devices, samples, **limits))


def _budget(given: int | None, specs: Mapping[str, PlanInput], devices: int | None) -> int:
    if given is not None:
        return as_int("budget_bytes", given)
    if devices is None:
        expected = "the bytes of all tables together"
        raise mismatch("budget_bytes", "None", expected, "Only with devices= it may be left out.")
    return sum(table.dense_bytes for table in specs.values())


def _check_budget(budget: int, least: int) -> None:
    if budget < least:
        expected = f"at least {least:,} bytes, the smallest form of all tables together"
        raise mismatch("budget_bytes", f"{budget:,} bytes", expected)


def _measured(
    specs: Mapping[str, PlanInput],
    candidates: dict[str, list[Candidate]],
    budget: int,
    bar: Progress,
) -> dict[str, Candidate]:
    """A candidate for every table that is measured on all rows, after few of these measurements.

    Errors on samples differ from these, and how much depends on the kind. So the best of every kind that is near what
    would be chosen is measured, too.
    """
    while True:
        chosen = allocate(candidates, budget)
        assert chosen is not None  # there is room for the smallest
        left = budget - sum(one.nbytes for one in chosen.values())
        wanted = [
            (name, other)
            for name, one in chosen.items()
            for other in (one, *rivals(candidates[name], one, one.nbytes + left))
            if other.make is not None
        ]
        if not wanted:
            return chosen

        def measured(of: tuple[str, Candidate]) -> Candidate:
            name, one = of
            with bar.stage(f"{name} as {one.label}"):
                return specs[name].fitted(one)

        for (name, one), new in zip(wanted, _together(bar, measured, wanted), strict=True):
            candidates[name] = [*(other for other in candidates[name] if other is not one), new]


def _together(
    bar: Progress, function: Callable[[_Given], _Result], given: Iterable[_Given]
) -> list[_Result]:
    """Results in several threads: programs are compiled while numpy fits."""
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            return list(pool.map(as_here(function), given))
        except BaseException:  # an interrupt, too, waits for the threads
            bar.stop()
            raise


def rivals(candidates: Sequence[Candidate], chosen: Candidate, room: int) -> list[Candidate]:
    """The best candidates of their kinds within so many bytes that are about as good, if they are not measured yet.

    Of each kind of codes, one of about as many bytes is measured. Errors of codes on the sample are compared with other
    errors on it.
    """

    def codes(one: Candidate) -> bool:
        return one.kind in OF_SAMPLES and 2 * one.nbytes >= chosen.nbytes

    def least(one: Candidate) -> float:
        """A lower bound of the error after a full fit."""
        fitted = one.kind in OF_SAMPLES and one.make is None
        if one.of_sample is None or fitted:
            return one.error
        return one.of_sample / OF_SAMPLES.get(one.kind, 1.0)

    def near(one: Candidate) -> bool:
        if codes(one) and one.sampled:
            return one.kind not in tried and least(one) <= least(chosen)
        if chosen.sampled and chosen.kind in OF_SAMPLES:  # its error says too little
            return False
        if codes(one):
            return one.error <= OF_QUICK * chosen.error
        about = _ABOUT_ROUNDED if one.kind in ROUNDED else _ABOUT
        return one.error <= about * chosen.error

    within = sorted((one for one in candidates if one.nbytes <= room), key=lambda one: one.error)
    tried = {one.kind for one in within if codes(one) and not one.sampled}
    best: dict[str, Candidate] = {}
    for one in filter(near, within):
        best.setdefault(one.kind, one)
    return [one for one in best.values() if one.make is not None and one is not chosen]


def _fill(
    specs: dict[str, PlanInput],
    candidates: dict[str, list[Candidate]],
    chosen: dict[str, Candidate],
    budget: int,
    bar: Progress,
) -> bool:
    """Adds tables of the kinds of `compress` that use what remains of the budget, in place; whether there are some.

    Where many bytes remain, these are of the kinds that were near what is chosen, or had no table of no more bytes.
    Beside numbers of few bits, there are always codes, as these were not tried in sizes that such numbers have.
    """
    left = budget - sum(one.nbytes for one in chosen.values())
    added = []
    for name, one in chosen.items():
        if not specs[name].measured or one.kind == DENSE:
            continue
        room = one.nbytes + left
        errors = [(other.kind, other.error) for other in candidates[name] if other.nbytes <= room]
        near = {kind for kind, error in errors if error <= _NEAR * one.error}
        far = {kind for kind, _ in errors} - near
        kinds = set(specs[name].kinds) - far if left > _WORTH * one.nbytes else set()
        larger = specs[name].small_within(bar, kinds | specs[name].codes_beside(one), room)
        candidates[name] = [*candidates[name], *larger]
        added += larger
    return bool(added)


def _caches(
    specs: dict[str, PlanInput],
    chosen: dict[str, Candidate],
    demands: dict[str, Demand],
    reserve: int,
) -> dict[str, tuple[RowCache, int]]:
    """Caches of the tensor trains whose sample has a knee, all reduced by the same factor if they are too large."""
    asking = {name: wanted for name, wanted in demands.items() if chosen[name].kind == TENSOR_TRAIN}
    total = sum(wanted.nbytes for wanted in asking.values())
    caches = {}
    for name, wanted in asking.items():
        share = reserve * wanted.nbytes // max(total, 1)
        cache, taken = cache_within(wanted, share, specs[name].features, specs[name].dtype)
        if cache is not None:
            caches[name] = cache, taken
    return caches


def _spend(specs: dict[str, PlanInput], chosen: dict[str, Candidate], left: int) -> None:
    """Gives the remaining bytes to tensor trains, in place, in descending order of their errors."""
    for name in sorted(chosen, key=lambda name: -chosen[name].error):
        now = chosen[name]
        if now.kind != TENSOR_TRAIN or left < specs[name].itemsize:
            continue
        limit = min(now.nbytes + left, specs[name].dense_bytes - 1)
        larger = specs[name].train(limit, ordered=now.id_order is not None)
        if larger.error < now.error:
            left -= larger.nbytes - now.nbytes
            chosen[name] = larger


def _planned(
    table: PlanInput,
    chosen: Candidate,
    cached: tuple[RowCache, int] | None,
    wanted: Demand | None,
    budget: int,
) -> PlannedTable:
    cache, taken = cached or (None, 0)
    reasons = [_reason(table, chosen, budget)]
    if lost := loss(chosen.error):
        reasons.append(lost)
    if wanted is not None and chosen.kind == TENSOR_TRAIN:
        if cache is not None:
            hits = hits_of(wanted, cache.capacity)
            reasons.append(f"the cache takes {hits:.0%} of the lookups")
        else:
            reasons.append("no cache: the sample asks for the rows too evenly for one that fits")
    return PlannedTable(
        table.num_embeddings,
        table.features,
        table.dtype,
        chosen.kind,
        chosen.shape,
        chosen.id_order,
        cache,
        chosen.nbytes + taken,
        table.dense_bytes,
        chosen.error,
        table.measured,
        "; ".join(reasons),
        chosen.table,
        chosen.detail,
    )


def _reason(table: PlanInput, chosen: Candidate, budget: int) -> str:
    if chosen.kind == DENSE:
        return f"takes {100 * chosen.nbytes / budget:.2g} % of the budget and has no error"
    if not table.measured:
        return "sizes only: pass the trained table to have it measured"
    if chosen.kind == LOW_RANK or chosen.table is not None:
        if chosen.nbytes < table.least_train_bytes:
            return "smaller than any tensor train"
        rival = table.rival(chosen.nbytes)
        size = f"{rival.nbytes:,}" if table.sampled else "as many"
        return f"a tensor train of {size} bytes has error {rival.error:.3g}"
    rival = table.low_rank_within(chosen.nbytes)
    if rival is None or rival.shape is None:
        return "smaller than any product of low rank"
    return f"low rank {rival.shape.ranks[0]}, of as many bytes, has error {rival.error:.3g}"


def allocate(
    candidates: Mapping[str, Sequence[Candidate]], budget: int
) -> dict[str, Candidate] | None:
    """A candidate for every table, of at most ``budget`` bytes together, or None if even the smallest are too many.

    All tables start with their smallest candidate. Then the step along a table's lower convex hull of squared error
    over bytes that takes off most per byte is made, again and again, the steps that no longer fit left out (Shoham
    and Gersho, "Efficient bit allocation for an arbitrary set of quantizers", 1988).
    """
    hulls = {name: _hull(some) for name, some in candidates.items()}
    place = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].nbytes for hull in hulls.values())
    if left < 0:
        return None
    open_tables = set(hulls)
    while open_tables:
        steps = []
        for name in sorted(open_tables):
            hull, at = hulls[name], place[name]
            if at + 1 == len(hull) or hull[at + 1].nbytes - hull[at].nbytes > left:
                open_tables.discard(name)
            else:
                steps.append((_slope(hull[at], hull[at + 1]), name))
        if not steps:
            break
        _, name = min(steps)
        hull, at = hulls[name], place[name]
        left -= hull[at + 1].nbytes - hull[at].nbytes
        place[name] = at + 1
    return {name: hull[place[name]] for name, hull in hulls.items()}


def _slope(small: Candidate, large: Candidate) -> float:
    """Change of the squared error per byte, below 0 on a hull."""
    return (large.error**2 - small.error**2) / (large.nbytes - small.nbytes)


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates on the lower convex hull, smallest first, each with less error than the one before."""
    hull: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (one.nbytes, one.error)):
        if hull and one.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], one):
            hull.pop()
        hull.append(one)
    return hull
