"""Stores that two processes commit together, while one of them is killed or finds the disk full, at every step.

    python -m tests.row_tiers.commits_run DIRECTORY

Prints, for every failure, process and step, how both processes end, and which commit each of them opens afterwards: 1,
or 2 that follows it. Where one was killed, the other is killed as well while it settles which of them it is.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_tt._tiers.disk import DiskStore, StoreError
from jax_tt._tiers.row_bytes import addresses, copy_rows
from jax_tt._tiers.store_index import StoreIndex
from tests.files.two_processes_run import Pair, full, killed

STEPS = {"open", "os.rename", "os.remove", "fsync"}
KEYS = np.arange(1000, dtype=np.uint64)


def of_both(run: Callable[[int, Pair], int]) -> list[int]:
    """What two processes return, or how they end; 3 by an error."""
    lines, children = socket.socketpair(), []
    for number in (0, 1):
        if child := os.fork():
            children.append(child)
            continue
        lines[1 - number].close()
        try:
            os._exit(run(number, Pair(number, lines[number])))
        except BaseException as error:
            os._exit(3 if isinstance(error, StoreError | ConnectionError) else 100)
    for line in lines:
        line.close()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def opened(path: Path, number: int, pair: Pair) -> DiskStore:
    return DiskStore(path / str(number), {"item": 8}, "about", pair)


def commit(path: Path, value: int, number: int, pair: Pair) -> int:
    store = opened(path, number, pair)
    rows = KEYS * np.uint64(value)
    store.put("item", KEYS, addresses(rows, np.arange(len(rows))))
    store.commit({"value": np.array(value)})
    return 0


def committed(path: Path, number: int, pair: Pair) -> int:
    """The commit that is there, whose rows are all there."""
    store = opened(path, number, pair)
    saved, read = store.saved(), np.zeros(len(KEYS), np.uint64)
    assert saved is not None
    value = int(saved["value"])

    def take(records: np.ndarray, positions: np.ndarray) -> None:
        copy_rows(records, addresses(read, positions), 8)

    assert store.get("item", KEYS, take).all() and (read == KEYS * np.uint64(value)).all()
    store.close()
    return value


def failing_commit(
    path: Path, failure: Callable[[], None], failing: int, last: int, number: int, pair: Pair
) -> int:
    """`commit`, in which one process fails before its step of this number; 2 if it does so without an error."""
    steps: list[str] = []

    def hook(event: str, arguments: Any) -> None:
        ours = event != "open" or str(arguments[0]).startswith(str(path))
        if event in STEPS and number == failing and ours:
            steps.append(event)
            if len(steps) == last + 1:
                failure()

    sys.addaudithook(hook)
    commit(path, 2, number, pair)
    return 2 if len(steps) > last else 0


def failing_open(path: Path, failing: int, number: int, pair: Pair) -> int:
    """`committed`, in which one process is killed before it completes or drops a commit."""
    if number == failing:
        StoreIndex.publish = StoreIndex.drop = lambda self: killed()
    return committed(path, number, pair)


def killed_commit(path: Path, failing: int, number: int, pair: Pair) -> int:
    """`commit`, in which one process is killed when both have prepared it."""
    if number == failing:
        StoreIndex.publish = lambda self: killed()
    return commit(path, 2, number, pair)


def other_table(path: Path, number: int, pair: Pair) -> int:
    DiskStore(path / str(number), {"item": 8}, "another", pair)
    return 0


def main(path: Path) -> None:
    first = path / "first"
    os.fsync = lambda descriptor: sys.audit(
        "fsync"
    )  # what is written outlives a process without it
    assert of_both(partial(commit, first, 1)) == [0, 0]
    mixed = path / "mixed"
    shutil.copytree(first, mixed)
    assert of_both(partial(commit, mixed, 2)) == [0, 0] and of_both(partial(committed, mixed)) == [
        2,
        2,
    ]
    shutil.rmtree(mixed / "1")
    shutil.copytree(first / "1", mixed / "1")
    assert of_both(partial(committed, mixed)) == [3, 3]  # saves of different times
    cut = path / "cut"
    shutil.copytree(first, cut)
    assert of_both(partial(killed_commit, cut, 1)) == [3, -9]
    assert of_both(partial(other_table, cut)) == [3, 3]  # and nothing is dropped
    assert of_both(partial(committed, cut)) == [2, 2]
    for failure, failing in itertools.product((killed, full), (0, 1)):
        for last in itertools.count():
            place = path / "second"
            shutil.copytree(first, place)
            ends = of_both(partial(failing_commit, place, failure, failing, last))
            if ends != [0, 0]:
                if failure is killed:
                    assert -9 in of_both(partial(failing_open, place, 1 - failing))
                saved = of_both(partial(committed, place))
                print(failure.__name__, failing, *ends, *saved)
            shutil.rmtree(place)
            if ends == [0, 0]:
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
