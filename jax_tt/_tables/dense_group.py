"""`DenseTables`: dense tables that native ops handle together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from jax_tt._lookup import _backend
from jax_tt._lookup._vma import vary_over, varying_axes
from jax_tt._native.dense import Backward, Forward, Update, run_together
from jax_tt._native.partition import is_partitioned, num_blocks

if TYPE_CHECKING:
    from jax_tt._lookup._groups import Call, Cotangents, Gradients, Use
    from jax_tt._lookup._wide import Wide


# Tables of one update: XLA takes time to compile it with the cube of the number of arrays that it changes in place.
_MOST = 300
# Ids of one update: its working memory grows with those of all its tables.
_MOST_IDS = 2**26


@dataclasses.dataclass(frozen=True)
class DenseTables:
    """The group of all dense tables of a call, for `jax_tt._lookup._groups`.

    One native call per pass takes all tables. On platforms without native ops, each table is on its own.

    Attributes:
        method: ``"auto"``, or ``"cuda_emulated"``.
    """

    method: str = "auto"

    def forward(self, calls: Sequence[Call], wide: Wide | None) -> tuple[Any, Any]:
        if wide is None:
            found = _in_parts(partial(_sums, self.method), [(call,) for call in calls])
            return [sums for sums, _ in found], [saved for _, saved in found]
        if _whole(calls):
            return _wide_sums(self.method, calls, wide)
        sums, saved = self.forward(calls, None)
        return wide.joined(sums), saved

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Gradients, wide: Wide | None
    ) -> list[Cotangents]:
        if wide is not None and not _whole(calls):
            gs, wide = _apart(calls, wide)(gs), None
        found: list[Cotangents] = [({}, None)] * len(calls)
        stepped, others = [], []
        for k, (call, g) in enumerate(zip(calls, _each(gs, calls, wide), strict=True)):
            table, lookup = call.use.table, call.use.lookup
            if g is None:
                continue
            if lookup.wanted.names and (table.update is None or table.update.is_native):
                (others if table.update is None else stepped).append(k)
                continue
            if wide is not None:
                (g,) = _apart([call], wide.of([k]))(gs)
            if lookup.wanted.names:
                # The sums of all tables stand for those of this one: they only order the step after the forward pass.
                found[k] = table.step(call.state, call.batch, residuals[k], g, lookup, call.values)
            elif lookup.wanted.weights:
                found[k] = {}, table.weights_gradient(call.state, call.batch, g, lookup)
        parts = [(part, _new_states) for part in _parts(calls, stepped)]
        parts += [(part, _gradients) for part in _parts(calls, others)]
        for members, of_part in parts:
            cotangents = partial(of_part, self.method)
            if wide is not None and members:
                own = [calls[k] for k in members], [residuals[k] for k in members]
                results = cotangents(*own, gs, wide.of(members))
            else:
                rows = [(calls[k], residuals[k], gs[k]) for k in members]
                results = _in_parts(cotangents, rows)
            for k, of_table in zip(members, results, strict=True):
                found[k] = of_table
        return found


def _parts(calls: Sequence[Call], members: Sequence[int]) -> list[list[int]]:
    """The members in parts that one native call takes."""
    size = -(-len(members) // max(1, -(-len(members) // _MOST)))  # of equal parts
    parts: list[list[int]] = []
    ids = 0
    for k in members:
        own = math.prod(calls[k].batch.ids.shape[:2])
        own = own if isinstance(own, int) else 0
        if not parts or len(parts[-1]) == size or ids + own > _MOST_IDS:
            parts.append([])
            ids = 0
        parts[-1].append(k)
        ids += own
    return parts


def _whole(calls: Sequence[Call]) -> bool:
    """Whether the batch is whole on this device, so that one array can have the sums of all its features."""
    return not any(
        not isinstance(call.batch.num_segments, int)
        or is_partitioned(num_blocks(call.batch.num_segments))
        or call.use.lookup.axis_name is not None
        or varying_axes(call.state, call.batch)
        for call in calls
    )


def _in_parts(of_part: Callable[..., list[Any]], rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``of_part(*columns)`` of rows that begin with a `Call`, all at once if possible.

    Batches that are partitioned over the devices in another number of blocks need another call.
    """
    parts: dict[int, list[int]] = {}
    for k, (call, *_) in enumerate(rows):
        blocks = num_blocks(call.batch.num_segments)
        parts.setdefault(blocks if is_partitioned(blocks) else 1, []).append(k)
    found: dict[int, Any] = {}
    for members in parts.values():
        columns = zip(*(rows[k] for k in members), strict=True)
        found.update(zip(members, of_part(*columns), strict=True))
    return [found[k] for k in range(len(rows))]


def _sums(method: str, calls: Sequence[Call]) -> list[Any]:
    axes = [varying_axes(call.state, call.batch) for call in calls]
    arrays = [
        vary_over((call.state, call.batch), own) for call, own in zip(calls, axes, strict=True)
    ]

    uses = [call.use for call in calls]

    def at_once(platform: str, arrays: Any) -> list[Any]:
        found = run_together(_forward_parts(platform, uses, arrays))
        return [vary_over(*pair) for pair in zip(found, axes, strict=True)]

    return _backend.run(method, at_once, partial(_one_by_one, uses), arrays)


def _wide_sums(method: str, calls: Sequence[Call], wide: Wide) -> tuple[jax.Array, list[Any]]:
    uses = [call.use for call in calls]

    def at_once(platform: str, arrays: Any) -> jax.Array:
        return run_together(_forward_parts(platform, uses, arrays), wide)

    def one_by_one(arrays: Any) -> jax.Array:
        return wide.joined([sums for sums, _ in _one_by_one(uses, arrays)])

    arrays = [(call.state, call.batch) for call in calls]
    array = _backend.run(method, at_once, one_by_one, arrays)
    # As a residual, it only orders the update after the forward pass; its first axis stands for one block.
    return array, [(array[None],) if call.use.lookup.wanted.names else () for call in calls]


def _one_by_one(uses: Sequence[Use], arrays: Any) -> list[Any]:
    return [
        use.table.forward(state, batch, use.lookup)
        for use, (state, batch) in zip(uses, arrays, strict=True)
    ]


def _forward_parts(platform: str, uses: Sequence[Use], arrays: Any) -> list[Forward]:
    return [
        Forward(*_arguments(platform, use, state, batch), sentinel=state.get("sentinel"))
        for use, (state, batch) in zip(uses, arrays, strict=True)
    ]


def _gradients(
    method: str,
    calls: Sequence[Call],
    residuals: Sequence[Any],
    gs: Gradients,
    wide: Wide | None = None,
) -> list[Cotangents]:
    axes = [
        varying_axes(call.state, call.batch, g)
        for call, g in zip(calls, _each(gs, calls, wide), strict=True)
    ]
    arrays = [(call.state, call.batch, saved) for call, saved in zip(calls, residuals, strict=True)]
    uses, apart = [call.use for call in calls], _apart(calls, wide)

    def one_by_one(arrays: Any, gs: Any) -> list[Any]:
        return [
            use.table.backward(state, batch, saved, g, use.lookup)
            for use, (state, batch, saved), g in zip(uses, arrays, apart(gs), strict=True)
        ]

    def at_once(platform: str, arrays: Any, gs: Any) -> list[Any]:
        own, shared = _operands_of(gs, len(uses), wide)
        parts = [
            Backward(*_arguments(platform, use, state, batch), g=g)
            for use, (state, batch, _), g in zip(uses, arrays, own, strict=True)
        ]
        found = run_together(parts, wide, shared)
        found = [vary_over(*pair) for pair in zip(found, axes, strict=True)]
        return [
            (dict(zip(use.table.param_names, grads, strict=True)), dweights)
            for use, (grads, dweights) in zip(uses, found, strict=True)
        ]

    return _backend.run(method, at_once, one_by_one, arrays, gs)


def _new_states(
    method: str,
    calls: Sequence[Call],
    residuals: Sequence[Any],
    gs: Gradients,
    wide: Wide | None = None,
) -> list[Cotangents]:
    tables = [call.use.table.innermost for call in calls]
    steps = [
        table.step_of(None, call.state, call.batch, g, call.use.lookup, call.values)
        for table, call, g in zip(tables, calls, _each(gs, calls, wide), strict=True)
    ]
    uses = [
        dataclasses.replace(call.use, lookup=step.lookup)
        for call, step in zip(calls, steps, strict=True)
    ]
    apart = _apart(calls, wide)
    arrays = [
        (call.state, step.batch, saved, step.values)
        for call, saved, step in zip(calls, residuals, steps, strict=True)
    ]
    gs = [step.g for step in steps] if wide is None else steps[0].g

    def one_by_one(arrays: Any, gs: Any) -> list[Any]:
        return [
            table.stepped_params(state, batch, saved, g, use.lookup, values)
            for table, use, (state, batch, saved, values), g in zip(
                tables, uses, arrays, apart(gs), strict=True
            )
        ]

    def at_once(platform: str, arrays: Any, gs: Any) -> list[Any]:
        own, shared = _operands_of(gs, len(uses), wide)
        parts = []
        for table, use, (state, batch, (out,), values), g in zip(
            tables, uses, arrays, own, strict=True
        ):
            ((slots,), of_all) = table.stepped_slots(state), _arguments(platform, use, state, batch)
            parts.append(Update(*of_all, slots=slots, out=out, g=g, values=values))
        if wide is not None:
            shared = {"out": arrays[0][2][0], **shared}
        return run_together(parts, wide, shared)

    found = _backend.run(method, at_once, one_by_one, arrays, gs)
    results = []
    for table, call, step, stepped in zip(tables, calls, steps, found, strict=True):
        new, _, dweights = table.after_step(call.state, step, *stepped)
        results.append((new, dweights))
    return results


def _each(gs: Gradients, calls: Sequence[Call], wide: Wide | None) -> Sequence[Any]:
    """The gradient that every call gets: its own, or the one that they share."""
    return gs if wide is None else [gs] * len(calls)


def _apart(calls: Sequence[Call], wide: Wide | None) -> Callable[[Gradients], Sequence[Any]]:
    """A function from gradients to those of the sums of every call."""
    shapes = [call.shape for call in calls]
    return lambda gs: gs if wide is None else wide.separated(gs, shapes)


def _operands_of(
    gs: Gradients, tables: int, wide: Wide | None
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The gradients as operands of every table, and as operands that the tables share."""
    return (gs, {}) if wide is None else ([None] * tables, {"g": gs})


def _arguments(platform: str, use: Use, state: Any, batch: Any) -> tuple[Any, ...]:
    """Those that native calls of all passes have."""
    table = use.table.innermost
    return table, platform, *table.params(state), batch, use.lookup
