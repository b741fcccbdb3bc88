"""Trains a click model on a stream of 64-bit ids, with several kinds of tables in the same memory, and compares them.

python -m examples.streaming.main [--data FILE] [--seeds 3] [--tune] [--help]
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

from examples.conditions import conditions
from examples.streaming import report, settings

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str]) -> None:
    """Runs the command line."""
    options = settings.parse(argv)
    if options.worker is not None:
        _work(options)
        return
    if options.fresh:
        shutil.rmtree(options.workdir, ignore_errors=True)
    if options.tune:
        text = report.learning_rates(_tuned(options, argv))
        print(f"\n{text}")
        (options.workdir / "tuning.txt").write_text(text + "\n")
        return
    seeds = range(options.seed, options.seed + options.seeds)
    results = {
        variant: [_measure(options.workdir, argv, variant, seed) for seed in seeds]
        for variant in options.variants
    }
    text = report.table(results)
    (options.workdir / "comparison.txt").write_text(text + "\n")
    figures = {"arguments": argv, **conditions(), "results": results}
    (options.workdir / "comparison.json").write_text(json.dumps(figures, indent=1) + "\n")
    report.picture(options.workdir / "comparison.png", results)
    print(f"\n{text}\n\nPicture: {options.workdir / 'comparison.png'}")


def _tuned(options: Any, argv: list[str]) -> dict[str, dict[float, dict[str, Any]]]:
    """Results by variant and learning rate."""
    return {
        variant: {
            rate: _measure(
                options.workdir, argv, variant, settings.TUNING_SEED, "--learning-rate", str(rate)
            )
            for rate in settings.LEARNING_RATES
        }
        for variant in options.variants
    }


def _measure(workdir: Path, argv: list[str], variant: str, seed: int, *more: str) -> dict[str, Any]:
    """Trains a variant in a separate process, so that none of them has the memory or the programs of another."""
    folder = workdir / "-".join([variant, str(seed), *more[1:]])
    own = ["--worker", variant, "--seed", str(seed), "--workdir", str(folder), *more]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        # Variants and seeds share most programs, whose compilation takes longer than a small run.
        "JAX_COMPILATION_CACHE_DIR": str((workdir / "programs").resolve()),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-m", "examples.streaming.main", *argv, *own]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        raise SystemExit(
            f"training {variant} ended with status {status}; run the command again to continue"
        )
    return json.loads((folder / "result.json").read_text())


def _work(options: Any) -> None:
    """Trains one variant; JAX is loaded by the processes that train only."""
    from examples.streaming.files import Interactions
    from examples.streaming.synthetic import DriftingClicks
    from examples.streaming.train import train

    if options.data is None:
        steps = 2000 if options.steps is None else options.steps
        stream = DriftingClicks(steps, options.batch_size, options.seed)
    else:
        stream = Interactions(options.data, options.batch_size, options.seed, options.steps)
    train(settings.config(options, options.worker), stream, options.windows, options.workdir)


if __name__ == "__main__":
    main(sys.argv[1:])
