"""What each test costs: processor seconds, its child processes included, and programs that XLA compiled.

A run ends with the sums and the dearest tests. ``--costs FILE`` writes those of all tests, one JSON object a line.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

SHOWN = 10
_PROGRAMS, _FOUND = (
    "/jax/core/compile/backend_compile_duration",
    "/jax/compilation_cache/cache_hits",
)
_counts = {_PROGRAMS: 0, _FOUND: 0}


def _count(event: str, *_: object, **__: object) -> None:
    if event in _counts:
        _counts[event] += 1


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_count)


def _now() -> tuple[float, int, int]:
    # The times of children are in it once they have ended and were waited for.
    return sum(os.times()[:4]), _counts[_PROGRAMS], _counts[_FOUND]


class Costs:
    """A plugin: measures in the processes that run tests, and sums up in the one that reports."""

    def __init__(self, path: str | None):
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._before = _now()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            seconds, programs, found = (
                now - before for now, before in zip(_now(), self._before, strict=True)
            )
            row = {
                "cpu": round(seconds, 3),
                "programs": programs,
                "compiled": programs - found,
                "dear": item.get_closest_marker("dear") is not None,
            }
            report.user_properties.append(("costs", row))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if row := dict(report.user_properties).get("costs"):
            self._rows[report.nodeid] = row

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._rows:
            return
        if self._path:
            lines = [json.dumps({"test": test} | row) for test, row in self._rows.items()]
            Path(self._path).write_text("\n".join(lines) + "\n")
        total = {
            name: sum(row[name] for row in self._rows.values())
            for name in ("cpu", "programs", "compiled")
        }
        terminalreporter.section("costs")
        terminalreporter.line(
            f"{len(self._rows)} tests: {total['cpu']:.0f} CPU s, {total['programs']} programs, "
            f"{total['compiled']} of them compiled"
        )
        for name, unit in (("cpu", "CPU s"), ("compiled", "compiled")):
            costs = ((row[name], test) for test, row in self._rows.items() if row[name])
            ranked = sorted(costs, reverse=True)
            for cost, test in ranked[:SHOWN]:
                terminalreporter.line(f"{cost:8.1f} {unit}  {test}")
