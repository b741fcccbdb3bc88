"""Trains one variant on a stream: every batch is predicted, then trained on.

Everything random is a function of the seed and the step and everything else is saved after every window, so that a run
that was killed and started again ends with the same numbers as an uninterrupted one.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.streaming import learners
from examples.streaming.clicks import Stream
from examples.streaming.history import History
from examples.streaming.settings import Config


def train(config: Config, stream: Stream, windows: int, workdir: Path) -> dict[str, Any]:
    """Trains in a folder, from the last window if it was stopped there.

    Args:
        windows: parts of the stream of which the quality is reported.

    Returns:
        The figures of the report; they are written to `result.json` in the folder as well.

    Raises:
        ValueError: the folder has a run with other settings.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    _check_same(workdir / "settings.json", {**asdict(config), "steps": stream.steps})
    result = workdir / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    learner = learners.make(config, workdir)
    saved = learner.restored()
    history = History() if saved is None else History.from_bytes(saved)
    _run(learner, stream, history, config.variant, max(1, stream.steps // windows))
    figures = _figures(config, learner, history, windows)
    unfinished = result.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(figures, indent=1) + "\n")
    unfinished.replace(result)
    return figures


def _run(
    learner: learners.Learner, stream: Stream, history: History, name: str, window: int
) -> None:
    """The rest of the stream."""
    bar = tqdm(total=stream.steps, initial=history.steps, desc=name, unit="step")
    began, waited = time.perf_counter(), learner.seconds_waited
    for outcome in learner.outcomes(stream.batches(history.steps)):
        now, waited_now = time.perf_counter(), learner.seconds_waited
        history.append(outcome, now - began, waited_now - waited)
        bar.update()
        step = history.steps
        if step % window == 0 or step == stream.steps:
            bar.set_postfix(auc=f"{history.quality(1 - window / step, 1)['auc']:.4f}")
            learner.save(history.to_bytes())
        began, waited = time.perf_counter(), waited_now
    bar.close()


def _figures(
    config: Config, learner: learners.Learner, history: History, windows: int
) -> dict[str, Any]:
    parts = [(k / windows, (k + 1) / windows) for k in range(windows)]
    return {
        "config": asdict(config),
        "steps": history.steps,
        "whole": history.quality(0, 1),
        "last": history.quality(2 / 3, 1),
        "windows": [history.quality(*part) for part in parts],
        "served": history.served(0, 1),
        "served_windows": [history.served(*part) for part in parts],
        "device_bytes": learner.device_bytes(),
        "other_bytes": learner.other_bytes(),
        "times_windows": [history.times(*part) for part in parts],
        **history.times(2 / 3, 1),  # where no programs are compiled any more
    }


def _check_same(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists():
        path.write_text(json.dumps(settings, indent=1) + "\n")
        return
    before = json.loads(path.read_text())
    changed = [
        f"{name}: {before.get(name)} then, {value} now"
        for name, value in settings.items()
        if before.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"workdir: {path.parent} has a run with other settings ({'; '.join(changed)}); use another --workdir, or "
            "--fresh."
        )
