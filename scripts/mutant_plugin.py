"""A pytest plugin of `scripts.mutants`: each test's outcome, and the planted faults whose places it reached.

Every process has a file of switches, which the planted sources map into memory, and one of results.
"""

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.mutant import NONE

_FOLDER = Path(os.environ["JAX_TT_MUTANT_RUN"])
_NAME = os.environ.get("PYTEST_XDIST_WORKER", "main")
_switches = _FOLDER / f"{_NAME}.switches"
_active = int(os.environ.get("JAX_TT_MUTANT", NONE))
_switches.write_bytes(_active.to_bytes(4, "little") + bytes(4096))
# Before anything imports jax_tt; processes that tests start inherit it.
os.environ["JAX_TT_MUTANTS"] = str(_switches)
with _switches.open("r+b") as _file:
    _bytes = mmap.mmap(_file.fileno(), 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _bytes[4:] = bytes(len(_bytes) - 4)
    item.stash[_began] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    outcomes = item.stash.setdefault(_outcomes, [])
    outcomes.append(report.outcome)
    if call.when == "teardown":
        outcome = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
        reached = [k for k, reached in enumerate(_bytes[4:]) if reached]
        seconds = sum(os.times()[:4]) - item.stash[_began]
        row = {"test": item.nodeid, "outcome": outcome, "cpu": seconds, "reached": reached}
        with (_FOLDER / f"{_NAME}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return report


_outcomes = pytest.StashKey[list[str]]()
_began = pytest.StashKey[float]()
