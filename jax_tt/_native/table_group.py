"""`TableGroup`: tables of one kind that native ops handle together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from jax_tt._jax import backend
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.operands import sentinel_operand
from jax_tt._native.partition import is_partitioned, num_blocks
from jax_tt._native.table_call import Calls, run_together
from jax_tt._table.groups import of_one_table

if TYPE_CHECKING:
    from jax_tt._table.groups import Call, Cotangents, Gradients, Use
    from jax_tt._table.wide import Wide

# Ids of one update: its working memory may grow with those of all its tables.
_MOST_IDS = 2**26


@dataclasses.dataclass(frozen=True)
class TableGroup:
    """The group of all tables of a kind, for `jax_tt._table.groups`.

    One native call per pass takes all tables that the kind can have in it. On platforms without that call, each table
    is on its own.

    Attributes:
        calls: the native calls of the kind.
        method: ``"auto"``, or ``"cuda_emulated"``.
    """

    calls: Calls
    method: str

    def forward(self, calls: Sequence[Call], wide: Wide | None) -> tuple[Any, Any]:
        if wide is not None:
            if self._in_columns(calls):
                return self._wide_sums(calls, wide)
            sums, saved = self.forward(calls, None)
            return wide.joined(sums), saved
        joined = [k for k, call in enumerate(calls) if self._joins(call)]
        found = dict(zip(joined, _in_parts(self._sums, [(calls[k],) for k in joined]), strict=True))
        for k, (use, state, batch, *_) in enumerate(calls):
            if k not in found:
                found[k] = use.table.forward(state, batch, use.lookup)
        sums, saved = zip(*(found[k] for k in range(len(calls))), strict=True)
        return sums, saved

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Gradients, wide: Wide | None
    ) -> list[Cotangents]:
        if wide is not None and not self._in_columns(calls):
            gs, wide = _apart(calls, wide)(gs), None
        found: list[Cotangents] = [({}, None)] * len(calls)
        stepped, others = [], []
        for k, (call, g) in enumerate(zip(calls, _each(gs, calls, wide), strict=True)):
            table, lookup = call.use.table, call.use.lookup
            if g is None:
                continue
            innermost: Any = table.innermost
            native = innermost.steps_natively
            if lookup.wanted.names and native and self._joins(call, g):
                (others if table.update is None else stepped).append(k)
                continue
            if wide is not None:
                (g,) = _apart([call], wide.of([k]))(gs)
            # The sums of all tables may stand for those of this one: they only order the step after the forward pass.
            found[k] = of_one_table(call, residuals[k], g)
        parts = [(part, self._new_states) for part in self._parts(calls, stepped)]
        parts += [(part, self._gradients) for part in self._parts(calls, others)]
        for members, of_part in parts:
            if wide is not None and members:
                own = [calls[k] for k in members], [residuals[k] for k in members]
                results = of_part(*own, gs, wide.of(members))
            else:
                rows = [(calls[k], residuals[k], gs[k]) for k in members]
                results = _in_parts(of_part, rows)
            for k, of_table in zip(members, results, strict=True):
                found[k] = of_table
        return found

    def _joins(self, call: Call, g: Any = None) -> bool:
        """Whether the native call on many tables takes this one."""
        return self.calls.forward.across_devices or (_whole([call]) and not varying_axes(g))

    def _in_columns(self, calls: Sequence[Call]) -> bool:
        """Whether the native call can have the sums of all features in one array."""
        return self.calls.forward.in_columns and _whole(calls)

    def _parts(self, calls: Sequence[Call], members: Sequence[int]) -> list[list[int]]:
        """The members in about equal parts that one native call takes."""
        arrays = [sum(map(len, (t.param_names, *t.stepped_names))) for t in _tables(calls)]
        total = sum(arrays[k] for k in members)
        most = -(-total // max(1, -(-total // self.calls.update.most_arrays)))
        parts: list[list[int]] = []
        size = ids = 0
        for k in members:
            own = math.prod(calls[k].batch.ids.shape[:2])
            own = own if isinstance(own, int) else 0
            if not parts or size >= most or ids + own > _MOST_IDS:
                parts.append([])
                size = ids = 0
            parts[-1].append(k)
            size += arrays[k]
            ids += own
        return parts

    def _sums(self, calls: Sequence[Call]) -> list[Any]:
        axes = [varying_axes(call.state, call.batch) for call in calls]
        arrays = [
            vary_over((call.state, call.batch), own) for call, own in zip(calls, axes, strict=True)
        ]
        uses = [call.use for call in calls]

        def at_once(platform: str, arrays: Any) -> list[Any]:
            found = run_together(self._forward_parts(platform, uses, arrays))
            return [vary_over(*pair) for pair in zip(found, axes, strict=True)]

        return backend.run(self.method, at_once, partial(_one_by_one, uses), arrays)

    def _wide_sums(self, calls: Sequence[Call], wide: Wide) -> tuple[jax.Array, list[Any]]:
        uses = [call.use for call in calls]

        def at_once(platform: str, arrays: Any) -> jax.Array:
            return run_together(self._forward_parts(platform, uses, arrays), wide)

        def one_by_one(arrays: Any) -> jax.Array:
            return wide.joined([sums for sums, _ in _one_by_one(uses, arrays)])

        arrays = [(call.state, call.batch) for call in calls]
        array = backend.run(self.method, at_once, one_by_one, arrays)
        # As a residual, it only orders the update after the forward pass; its first axis stands for one block.
        return array, [(array[None],) if call.use.lookup.wanted.names else () for call in calls]

    def _forward_parts(self, platform: str, uses: Sequence[Use], arrays: Any) -> list[Any]:
        return [
            self.calls.forward(
                *_arguments(platform, use, state, batch),
                sentinel=sentinel_operand(state.get("sentinel")),
            )
            for use, (state, batch) in zip(uses, arrays, strict=True)
        ]

    def _gradients(
        self,
        calls: Sequence[Call],
        residuals: Sequence[Any],
        gs: Gradients,
        wide: Wide | None = None,
    ) -> list[Cotangents]:
        axes = [
            varying_axes(call.state, call.batch, g)
            for call, g in zip(calls, _each(gs, calls, wide), strict=True)
        ]
        arrays = [
            (call.state, call.batch, saved) for call, saved in zip(calls, residuals, strict=True)
        ]
        uses, apart = [call.use for call in calls], _apart(calls, wide)

        def one_by_one(arrays: Any, gs: Any) -> list[Any]:
            return [
                use.table.backward(state, batch, saved, g, use.lookup)
                for use, (state, batch, saved), g in zip(uses, arrays, apart(gs), strict=True)
            ]

        def at_once(platform: str, arrays: Any, gs: Any) -> list[Any]:
            own, shared = _operands_of(gs, len(uses), wide)
            parts = [
                self.calls.backward(*_arguments(platform, use, state, batch), residuals=saved, g=g)
                for use, (state, batch, saved), g in zip(uses, arrays, own, strict=True)
            ]
            found = run_together(parts, wide, shared)
            found = [vary_over(*pair) for pair in zip(found, axes, strict=True)]
            return [
                (dict(zip(use.table.param_names, grads, strict=True)), dweights)
                for use, (grads, dweights) in zip(uses, found, strict=True)
            ]

        return backend.run(self.method, at_once, one_by_one, arrays, gs)

    def _new_states(
        self,
        calls: Sequence[Call],
        residuals: Sequence[Any],
        gs: Gradients,
        wide: Wide | None = None,
    ) -> list[Cotangents]:
        tables = _tables(calls)
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
            for table, use, (state, batch, saved, values), g in zip(
                tables, uses, arrays, own, strict=True
            ):
                of_all = _arguments(platform, use, state, batch)
                own_part = {"slots": table.stepped_slots(state), "residuals": saved, "g": g}
                parts.append(self.calls.update(*of_all, **own_part, values=values))
            if wide is not None:
                shared = {"out": arrays[0][2][0], **shared}
            return [
                table.varying_step(found, state, batch, g)
                for table, found, (state, batch, *_), g in zip(
                    tables, run_together(parts, wide, shared), arrays, own, strict=True
                )
            ]

        found = backend.run(self.method, at_once, one_by_one, arrays, gs)
        results = []
        for table, call, step, stepped in zip(tables, calls, steps, found, strict=True):
            new, _, dweights = table.after_step(call.state, step, *stepped)
            results.append((new, dweights))
        return results


def _tables(calls: Sequence[Call]) -> list[Any]:
    return [call.use.table.innermost for call in calls]


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


def _one_by_one(uses: Sequence[Use], arrays: Any) -> list[Any]:
    return [
        use.table.forward(state, batch, use.lookup)
        for use, (state, batch) in zip(uses, arrays, strict=True)
    ]


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
    return table, platform, table.params(state), batch, use.lookup
