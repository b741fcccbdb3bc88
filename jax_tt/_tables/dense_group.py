"""`DENSE_TABLES`: dense tables that the native ops of the CPU handle together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax

from jax_tt._lookup import _backend
from jax_tt._lookup._vma import vary_over, varying_axes
from jax_tt._native.dense import Backward, Forward, Update, run_together
from jax_tt._native.partition import is_partitioned, num_blocks

if TYPE_CHECKING:
    from jax_tt._lookup._groups import Call, Cotangents


@dataclasses.dataclass(frozen=True)
class DenseTables:
    """The group of all dense tables of a call, for `jax_tt._lookup._groups`.

    On a CPU, one native call per pass takes all tables. Elsewhere, each table has its own.
    """

    def forward(self, calls: Sequence[Call]) -> tuple[list[jax.Array], list[Any]]:
        found = _in_parts(_sums, [(call,) for call in calls])
        return [sums for sums, _ in found], [saved for _, saved in found]

    def backward(
        self, calls: Sequence[Call], residuals: Sequence[Any], gs: Sequence[jax.Array | None]
    ) -> list[Cotangents]:
        found: list[Cotangents] = [({}, None)] * len(calls)
        stepped, others = [], []
        for k, (call, g) in enumerate(zip(calls, gs, strict=True)):
            table, lookup = call.use.table, call.use.lookup
            if g is None:
                continue
            if lookup.wanted.names:
                (others if table.update is None else stepped).append(k)
            elif lookup.wanted.weights:
                found[k] = {}, table.weights_gradient(call.state, call.batch, g, lookup)
        for members, cotangents in ((stepped, _new_states), (others, _gradients)):
            rows = [(calls[k], residuals[k], gs[k]) for k in members]
            for k, own in zip(members, _in_parts(cotangents, rows), strict=True):
                found[k] = own
        return found


DENSE_TABLES = DenseTables()


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


def _sums(calls: Sequence[Call]) -> list[Any]:
    axes = [varying_axes(call.state, call.batch) for call in calls]
    arrays = [
        vary_over((call.state, call.batch), own) for call, own in zip(calls, axes, strict=True)
    ]

    def one_by_one(arrays: Any) -> list[Any]:
        return [
            call.use.table.forward(state, batch, call.use.lookup)
            for call, (state, batch) in zip(calls, arrays, strict=True)
        ]

    def at_once(arrays: Any) -> list[Any]:
        parts = [
            Forward(*_arguments(call, state, batch), sentinel=state.get("sentinel"))
            for call, (state, batch) in zip(calls, arrays, strict=True)
        ]
        return [vary_over(*pair) for pair in zip(run_together(parts), axes, strict=True)]

    return _on_cpu(at_once, one_by_one, arrays)


def _gradients(
    calls: Sequence[Call], residuals: Sequence[Any], gs: Sequence[jax.Array]
) -> list[Cotangents]:
    axes = [varying_axes(call.state, call.batch, g) for call, g in zip(calls, gs, strict=True)]
    arrays = [
        (call.state, call.batch, saved, g)
        for call, saved, g in zip(calls, residuals, gs, strict=True)
    ]

    def one_by_one(arrays: Any) -> list[Any]:
        return [
            call.use.table.backward(state, batch, saved, g, call.use.lookup)
            for call, (state, batch, saved, g) in zip(calls, arrays, strict=True)
        ]

    def at_once(arrays: Any) -> list[Any]:
        parts = [
            Backward(*_arguments(call, state, batch), g=g)
            for call, (state, batch, _, g) in zip(calls, arrays, strict=True)
        ]
        found = [vary_over(*pair) for pair in zip(run_together(parts), axes, strict=True)]
        return [
            (dict(zip(call.use.table.param_names, grads, strict=True)), dweights)
            for call, (grads, dweights) in zip(calls, found, strict=True)
        ]

    return _on_cpu(at_once, one_by_one, arrays)


def _new_states(
    calls: Sequence[Call], residuals: Sequence[Any], gs: Sequence[jax.Array]
) -> list[Cotangents]:
    tables = [call.use.table.innermost for call in calls]
    steps = [
        table.step_of(None, call.state, call.batch, g, call.use.lookup, call.values)
        for table, call, g in zip(tables, calls, gs, strict=True)
    ]
    calls = [
        call._replace(use=dataclasses.replace(call.use, lookup=step.lookup))
        for call, step in zip(calls, steps, strict=True)
    ]
    arrays = [
        (call.state, step.batch, saved, step.g, step.values)
        for call, saved, step in zip(calls, residuals, steps, strict=True)
    ]

    def one_by_one(arrays: Any) -> list[Any]:
        return [
            table.stepped_params(state, batch, saved, g, call.use.lookup, values)
            for table, call, (state, batch, saved, g, values) in zip(
                tables, calls, arrays, strict=True
            )
        ]

    def at_once(arrays: Any) -> list[Any]:
        parts = []
        for table, call, (state, batch, (out,), g, values) in zip(
            tables, calls, arrays, strict=True
        ):
            ((slots,), of_all) = table.slots(state), _arguments(call, state, batch)
            parts.append(Update(*of_all, slots=slots, out=out, g=g, values=values))
        return run_together(parts)

    found = _on_cpu(at_once, one_by_one, arrays)
    results = []
    for table, call, step, stepped in zip(tables, calls, steps, found, strict=True):
        new, _, dweights = table.after_step(call.state, step, *stepped)
        results.append((new, dweights))
    return results


def _arguments(call: Call, state: Any, batch: Any) -> tuple[Any, ...]:
    """Those that native calls of all passes have."""
    table = call.use.table.innermost
    return table, "cpu", *table.params(state), batch, call.use.lookup


def _on_cpu(
    at_once: Callable[[Any], list[Any]], one_by_one: Callable[[Any], list[Any]], arrays: Any
) -> list[Any]:
    if "cpu" not in _backend.native_platforms():
        return one_by_one(arrays)
    return lax.platform_dependent(arrays, cpu=at_once, default=one_by_one)
