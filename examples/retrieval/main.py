"""Trains matrix factorisation with dense and TT tables, each in a separate process, and compares the results.

python -m examples.retrieval.main --data TRAIN_FILE_OR_DIRECTORY [--quick] [--help]
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if (
    not __package__
):  # run as a script: `examples` is found from the checkout, the rest where it is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.retrieval import report, settings

ROOT = Path(__file__).resolve().parents[2]


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
    text = report.table(results, options.k)
    (options.workdir / "comparison.txt").write_text(text + "\n")
    figures = {"arguments": argv, **report.conditions(), "results": results}
    (options.workdir / "comparison.json").write_text(json.dumps(figures, indent=1) + "\n")
    report.picture(options.workdir / "comparison.png", results, options.k)
    print(f"\n{text}\n\nPicture: {options.workdir / 'comparison.png'}")


def _work(options: Any) -> None:
    """Trains one variant; JAX is loaded by the processes that train only."""
    from examples.retrieval import data
    from examples.retrieval.train import train

    interactions = data.load(options.data, options.test, options.layout)
    if options.validation:
        interactions = data.hold_out(interactions, options.validation, options.seed)
    print(f"{options.worker}: {interactions}")
    train(
        settings.config(options, options.worker),
        interactions,
        options.workdir / options.worker,
        k=options.k,
        test_users=options.test_users,
        evaluate_every=options.evaluate_every,
    )


def _measure(workdir: Path, variant: str, argv: list[str]) -> dict[str, Any]:
    """Trains a variant in a separate process, so that its peak memory can be measured."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "examples.retrieval.main", *argv, "--worker", variant]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        raise SystemExit(
            f"training {variant} ended with status {status}; run the command again to continue"
        )
    return json.loads((workdir / variant / "result.json").read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
