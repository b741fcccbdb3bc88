"""Trains DLRM with dense and TT tables, each in a separate process, and compares the results.

python examples/dlrm/main.py --help
"""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

if (
    not __package__
):  # run as a script: `examples` is found from the checkout, everything else where it is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.dlrm import report
from examples.dlrm.config import Plan, parse
from examples.dlrm.result import Result, available_memory

BIG_STEPS = 4


def main(argv: list[str]) -> None:
    """Runs the command line."""
    plan = parse(argv)
    if plan.worker is not None:
        from examples.dlrm.train import (
            train,
        )  # JAX is loaded by the processes that train, not by this one

        if plan.member is not None:
            from examples.dlrm.devices import join

            join(plan.config, *plan.member)
        result = train(plan.config, plan.worker)
        if plan.member is None or plan.member[0] == 0:
            result.save(_result_path(plan, plan.worker))
        return
    big = []
    with tempfile.TemporaryDirectory() as programs:
        # What the models have in common, the first process compiles for all.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        results = [_measure(plan, variant, argv) for variant in plan.variants]
        if plan.big_table:
            print(f"\nOne table of {plan.big_table[0]:,} x {plan.big_table[1]}:", flush=True)
            big = [_measure_big(plan, variant) for variant in plan.variants]
    out = Path(plan.config.out)
    text = report.table(results, big, plan.big_table)
    (out / "comparison.txt").write_text(text + "\n")
    report.picture(out / "comparison.png", results, big, plan.big_table)
    print(f"\n{text}\n\nPicture: {out / 'comparison.png'}")


def _result_path(plan: Plan, variant: str) -> Path:
    return Path(plan.config.out) / f"{variant}.json"


def _measure(plan: Plan, variant: str, argv: list[str]) -> Result:
    """Trains a variant in a separate process, so that its peak memory can be measured."""
    _work(variant, argv, plan.config.processes)
    return Result.load(_result_path(plan, variant))


def _measure_big(plan: Plan, variant: str) -> Result | str:
    """A few steps of the same model with one big table, or the reason why there are none."""
    assert plan.big_table is not None
    rows, features = plan.big_table
    copies = {"dense_optax": 2.5, "dense_fused": 1.5}.get(variant, 0)
    needed, free = copies * rows * features * 4 + 10**9, available_memory()
    if free is not None and free < needed:
        return f"left out: needs {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"
    out = Path(plan.config.out) / "big_table"
    settings = {
        "--data": "synthetic",
        "--tables": rows,
        "--features": features,
        "--tt-ranks": 32,
        "--cache": 0,
        "--table-rule": "sgd",
        "--steps": BIG_STEPS,
        "--eval-examples": 0,
        "--out": out,
    }
    _work(variant, [str(part) for pair in settings.items() for part in pair])
    return Result.load(out / f"{variant}.json")


def _work(variant: str, argv: list[str], processes: int = 1) -> None:
    command = [sys.executable, __file__, *argv, "--worker", variant]
    members = [command]
    if processes > 1:
        port = str(_free_port())
        members = [[*command, "--member", str(k), port] for k in range(processes)]
    workers = [subprocess.Popen(own) for own in members]
    # The others of one that fails stop by themselves.
    for status in [worker.wait() for worker in workers]:
        if status:
            raise SystemExit(f"training {variant} ended with status {status}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main(sys.argv[1:])
