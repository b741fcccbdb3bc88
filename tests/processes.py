"""Programs and modules of the tests in processes of their own, or in several that find each other on loopback."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
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


def compiler_cache() -> list[str]:
    """What to put before a compilation."""
    return [found] if (found := shutil.which("ccache")) else []


def build(
    compiler: str, flags: Sequence[object], sources: Iterable[object], made: Path
) -> subprocess.CompletedProcess[str]:
    """Compiles C++ and CUDA sources of this repository one by one, through a compiler cache if there is one, and links.

    It returns the compilation that failed, or what the linker says.
    """
    objects = []
    for k, source in enumerate(map(str, sources)):
        objects.append(made.with_name(f"{made.name}_{k}.o"))
        language = ["-x", "c++"] if source.endswith(".cu") else []
        compilation = [
            *compiler_cache(),
            compiler,
            *flags,
            *language,
            "-c",
            source,
            "-o",
            objects[-1],
        ]
        done = _run(compilation)
        if done.returncode:
            return done
    return _run([compiler, *flags, *objects, "-o", made])


def _run(command: list[object]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)


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
