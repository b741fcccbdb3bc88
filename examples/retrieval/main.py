"""Trains matrix factorisation with dense and TT tables, each in a separate process, and compares the results.

python -m examples.retrieval.main --data TRAIN_FILE_OR_DIRECTORY [--quick] [--help]
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.conditions import conditions
from examples.retrieval import settings


def main(argv: list[str]) -> None:
    """Runs the command line."""
    options = settings.parse(argv)
    if options.worker is not None:
        _work(options)
        return
    if options.fresh:
        for variant in options.variants:
            shutil.rmtree(options.workdir / variant, ignore_errors=True)
    results = [_measure(options.workdir, variant, argv) for variant in options.variants]
    text = table(results, options.k)
    (options.workdir / "comparison.txt").write_text(text + "\n")
    figures = {"arguments": argv, **conditions(), "results": results}
    (options.workdir / "comparison.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\n{text}")


def _work(options: Any) -> None:
    """Trains one variant; JAX is loaded by the processes that train only."""
    from examples.retrieval import data
    from examples.retrieval.model import make_model
    from examples.retrieval.train import train

    try:
        interactions = data.load(options.data, options.test, options.layout)
        print(f"{options.worker}: {interactions}")
        config = settings.config(options, options.worker)
        train(
            config,
            interactions,
            make_model(config, interactions),
            options.workdir / options.worker,
            k=options.k,
            test_users=options.test_users,
            evaluate_every=options.evaluate_every,
        )
    except ValueError as error:  # of the data or of the workdir
        raise SystemExit(f"{options.worker}: {error}") from error


def _measure(workdir: Path, variant: str, argv: list[str]) -> dict[str, Any]:
    """The result of a variant, which is trained in a separate process."""
    command = [sys.executable, "-m", "examples.retrieval.main", *argv, "--worker", variant]
    status = subprocess.run(command, check=False).returncode
    if status == 1:  # an error, which the process has printed
        raise SystemExit(status)
    if status:
        raise SystemExit(
            f"training {variant} ended with status {status}; run the command again to continue"
        )
    return json.loads((workdir / variant / "result.json").read_text())


def table(results: Sequence[dict[str, Any]], k: int) -> str:
    """A line per result of `train`, as text."""
    head = (f"recall@{k}", "parameters", "tables", "smaller by", "state", "a step")
    lines = [" " * 13 + (" {:>11}" * len(head)).format(*head)]
    for r in results:
        label = settings.VARIANTS[r["variant"]].label
        lines.append(
            f"{label:13} {r['recall']:11.4f} {r['parameters']:11,} {r['bytes'] / 1e6:8.2f} MB "
            f"{r['compression']:10.1f}x {r['state_bytes'] / 1e6:8.2f} MB {r['step_ms']:8.2f} ms"
        )
    lines.append(
        f"Recall over all items for {results[0]['test_users']:,} test users, train items left out. "
        "The state is the tables and their optimizers."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
