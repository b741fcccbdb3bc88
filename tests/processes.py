"""Programs and modules of the tests in processes of their own, or in several that find each other on loopback."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def run_python(
    *arguments: object, folder: Path = ROOT, only: bool = False, **variables: str
) -> str:
    """What a Python of its own writes; with ``only``, it has no environment variables but the given ones."""
    environment = {} if only else dict(os.environ)
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def free_port() -> str:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs a module of the tests."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.{program}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outputs_of(workers: list[subprocess.Popen[str]], timeout: float | None = 600) -> list[str]:
    """What processes have written once all of them have ended."""
    try:
        return [worker.communicate(timeout=timeout)[0] for worker in workers]
    finally:
        for worker in workers:  # one that waits for a peer that died
            if worker.poll() is None:
                worker.kill()


def launch(
    folder: Path, count: int, program: str, *arguments: str, timeout: float | None = 600
) -> list[dict[str, np.ndarray]]:
    """The results of each of ``count`` processes: ``PROGRAM PROCESS COUNT PORT [ARGUMENTS] OUT.npz``."""
    port = free_port()
    paths = [folder / f"{count}-{process}.npz" for process in range(count)]
    workers = [
        started(program, str(process), str(count), port, *arguments, str(path))
        for process, path in enumerate(paths)
    ]
    outputs = outputs_of(workers, timeout)
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output[-4000:]
    return [dict(np.load(path)) for path in paths]
