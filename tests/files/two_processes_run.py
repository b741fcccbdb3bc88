"""A dump that two processes write together, while one of them is killed or finds the disk full, at every step.

    python -m tests.files.two_processes_run DIRECTORY

Prints, for every failure, process and step, how both processes end, whether the directory has its name, the number of
files of keys, and which dump is read: 1, or 2 that is to replace it.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_tt._base.progress import Progress
from jax_tt._formats.dump import Dump, write_dump
from jax_tt._formats.stored import FileError
from jax_tt._formats.team import Team

STEPS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


class Pair(Team):
    """One of two processes, which sum numbers over a line between them."""

    def __init__(self, number: int, line: socket.socket) -> None:
        super().__init__()
        self._processes, self.alone = [0, 1], False
        self._line = line
        jax.process_index = lambda backend=None: number  # pyright: ignore[reportPrivateImportUsage]

    def summed(self, numbers: np.ndarray) -> np.ndarray:
        self._line.sendall(numbers.tobytes())
        other = b""
        while len(other) < numbers.nbytes:
            if not (more := self._line.recv(numbers.nbytes - len(other))):
                raise ConnectionError("the other process has ended")
            other += more
        return numbers + np.frombuffer(other, numbers.dtype).reshape(numbers.shape)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def write(path: Path, value: int, team: Team) -> None:
    part = {"key": np.arange(5, dtype=np.uint64), "score": np.zeros(5, np.uint64)}
    part |= {"touched": np.ones(5, np.int32), "x": np.full((5, 2), value, np.float32)}
    about = {"features": 2, "keys": 10, "since": None, "arrays": {"x": "float32"}}
    parts = [(lambda: part) if team.writes(process) else None for process in (0, 1)]
    bar = Progress(False, "", 1)
    write_dump(path, parts, {}, about, bar, overwrite=True, team=team)


def end(path: Path, value: int, team: Team) -> int:
    try:
        write(path, value, team)
    except (FileError, ConnectionError):
        return 1
    return 0


def written(
    path: Path,
    value: int,
    failure: Callable[[], None] = killed,
    failing: int = 0,
    last: int = 10**6,
) -> list[int]:
    """How two processes end, one of which fails before its step of this number: 0 without a failure, 1 by an error.

    The one that fails is a fork, which takes most of the time of a write; the other is this process.
    """
    lines, other = socket.socketpair(), 1 - failing
    if not (child := os.fork()):
        lines[other].close()
        steps: list[str] = []

        def hook(event: str, arguments: Any) -> None:
            del arguments
            if event in STEPS:
                steps.append(event)
                if len(steps) == last + 1:  # there may be room again afterwards
                    failure()

        sys.addaudithook(hook)
        ended = end(path, value, Pair(failing, lines[failing]))
        os._exit(ended or (2 if len(steps) > last else 0))
    lines[failing].close()
    ends = [end(path, value, Pair(other, lines[other]))] * 2
    lines[other].close()
    ends[failing] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ends


def main(path: Path) -> None:
    os.fsync = lambda descriptor: None  # what is written outlives a process without it
    for failure in killed, full:
        for number in (0, 1):
            for step in itertools.count():
                assert written(path, 1) == [0, 0]
                assert os.listdir(path.parent) == [path.name]
                if (ends := written(path, 2, failure, number, step)) == [0, 0]:
                    break
                parts = list(Dump.open(path).parts({"x": (2,)}))
                values = np.unique(np.concatenate([part["x"] for part in parts]))
                print(failure.__name__, number, *ends, path.is_dir(), len(parts), *values)


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "dump")
