"""Hostile calls, in processes of their own: ``python -m tests.fuzz --calls 100000``.

Prints how many calls raised, returned, and returned what numpy says. A call that kills or hangs its process, raises an
error of the wrong kind or returns a wrong value fails the run, and the command that repeats it alone is printed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import faulthandler
import importlib
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time

# Share of the calls that each part gets: a raw call is compiled first, a traced one is traced, one of files is a run of
# the command line, one of collections compiles many tables, and one of moves writes and reads a hash table.
SHARES = {
    "data": 0.7368,
    "offsets": 0.1,
    "trace": 0.08,
    "raw": 0.04,
    "host": 0.02,
    "files": 0.02,
    "collection": 0.0012,
    "moves": 0.002,
}
MIN_CALLS = 500  # of a process, which starts JAX for them
# Each process compiles some 200 programs in its first thousand calls, which takes as long as a hundred thousand others.
COMPILED_FIRST = ("offsets",)
CLEAR_EVERY = 1000  # programs compiled for one call each would fill the memory
_AT = struct.Struct("qq")  # how far a process is: the number of a part, and a call of it


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=SHARES, help="run this part alone, with all the calls")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for each process")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="processes at once; the calls are the same for any number",
    )
    parser.add_argument("--worker", nargs="+", metavar="PART", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--progress", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        calls = {part: int(n) for part, n in (one.split(":") for one in options.worker)}
        return _work(calls, options.seed, options.first, options.progress)
    parts = {options.part: 1.0} if options.part else SHARES
    tasks = []
    for part, share in parts.items():
        calls = round(options.calls * share)
        # Eight to a job, so that none ends long before the others.
        pieces = options.jobs * (1 if part in COMPILED_FIRST else 8)
        size = max(MIN_CALLS, -(-calls // pieces))
        tasks += [(part, first, min(size, calls - first)) for first in range(0, calls, size)]
    failures = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = [
            pool.submit(run, {part: calls}, options.seed, options.timeout, first)
            for part, first, calls in tasks
        ]
        for task in concurrent.futures.as_completed(running):
            passed, text = task.result()
            print(text, flush=True)
            failures += not passed
    total = sum(calls for *_, calls in tasks)
    print(f"{total} calls in {len(tasks)} processes: {failures} failures")
    return int(failures > 0)


def run(calls: dict[str, int], seed: int, timeout: float, first: int = 0) -> tuple[bool, str]:
    """Runs so many calls of parts in a process of their own; whether they passed, and its report."""
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(_AT.pack(0, first))
        progress.flush()
        command = [sys.executable, "-m", "tests.fuzz", "--seed", str(seed), "--first", str(first)]
        command += ["--progress", progress.name, "--worker"]
        command += [f"{part}:{number}" for part, number in calls.items()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
            status = done.returncode
            output, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired as expired:
            status, output = None, _text(expired.stdout)
            errors = f"not done after {timeout:.0f} s\n" + _text(expired.stderr)
        if status == 0:
            return True, output.strip()
        progress.seek(0)
        which, at = _AT.unpack(progress.read(_AT.size))
        part = list(calls)[which]
    death = (
        f"the process died by signal {-status}" if status is not None and status < 0 else "failed"
    )
    repeat = f"python -m tests.fuzz --seed {seed} --first {at} --worker {part}:1"
    return False, (
        f"{part}: call {at} with seed {seed}: {death}\n"
        f"repeat it with: {repeat}\n{output}{errors[-6000:]}"
    )


def _text(output: object) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else str(output or "")


def _work(calls: dict[str, int], seed: int, first: int, progress: str | None) -> int:
    faulthandler.enable()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "moves" in calls:
        devices = " --xla_force_host_platform_device_count=4"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + devices
    import jax
    import numpy as np

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    size = _AT.size
    position = mmap.mmap(os.open(progress, os.O_RDWR), size) if progress else bytearray(size)
    for which, (part, number) in enumerate(calls.items()):
        one = importlib.import_module(f"tests.fuzz.{part}").one
        outcomes: collections.Counter[str] = collections.Counter()
        start = time.perf_counter()
        for call in range(first, first + number):
            position[:size] = _AT.pack(which, call)  # survives whatever happens to this process
            outcomes[one(np.random.default_rng((seed, list(SHARES).index(part), call)))] += 1
            if part not in ("data", "offsets") and call % CLEAR_EVERY == CLEAR_EVERY - 1:
                jax.clear_caches()
        took = time.perf_counter() - start
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        print(f"{part}: {number} calls from {first} on in {took:.0f} s, seed {seed}: {told}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
