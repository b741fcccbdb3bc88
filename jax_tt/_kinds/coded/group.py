"""Lookups of any number of coded tables that are one native call on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jax_tt._jax.backend import by_platform
from jax_tt._jax.vma import vary_over, varying_axes
from jax_tt._native.coded import Forward
from jax_tt._native.table_call import run
from jax_tt._native.table_group import alike, innermost_call, separate_gradients
from jax_tt._table.groups import Call, Cotangents, Gradients, of_one_table
from jax_tt._table.rotation import rotation_of, turned
from jax_tt._table.wide import Wide


@dataclasses.dataclass(frozen=True)
class CodedGroup:
    """The group of coded tables with one method, for `jax_tt._table.groups`; each is stepped on its own."""

    method: str

    def forward(self, calls: Sequence[Call], wide: Wide | None) -> tuple[Any, Any]:
        calls = list(map(innermost_call, calls))
        results: dict[int, Any] = {}
        for members in alike(calls):
            found = lookups_of_codes([calls[k] for k in members])
            results.update(zip(members, found, strict=True))
        sums, saved = zip(*(results[k] for k in range(len(calls))), strict=True)
        return (sums if wide is None else wide.joined(sums)), saved

    def backward(
        self, calls: Sequence[Call], residuals: Any, gs: Gradients, wide: Wide | None
    ) -> list[Cotangents]:
        calls = list(map(innermost_call, calls))
        return list(map(of_one_table, calls, residuals, separate_gradients(calls, gs, wide)))


def lookups_of_codes(calls: Sequence[Call]) -> list[tuple[jax.Array, Any]]:
    """Sums and residuals of each table, all of which have `CodedTable.reads_codes`."""
    tables: list[Any] = [call.use.table for call in calls]
    axes = [
        varying_axes(table.spec.params(call.state), call.batch)
        for table, call in zip(tables, calls, strict=True)
    ]

    def native(calls: Sequence[Call]) -> list[Any]:
        return list(map(vary_over, run([Forward("cpu", call) for call in calls]), axes))

    def of_entries(calls: Sequence[Call]) -> list[Any]:
        found = (table.sums_of_entries(call) for table, call in zip(tables, calls, strict=True))
        return list(map(vary_over, found, axes))

    results = by_platform({"cpu": native}, of_entries, list(map(vary_over, calls, axes)))
    return [
        (turned(sums, rotation_of(table, call.state), call.use.lookup.precision), residuals)
        for table, call, (sums, residuals) in zip(tables, calls, results, strict=True)
    ]
