"""The streaming example: the stream, and that all its runs predict the same."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("flax")

from examples.dlrm.metrics import auc
from examples.streaming import main
from examples.streaming.synthetic import DriftingClicks

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")


def ids_of(stream: DriftingClicks, feature: str, first: int, last: int) -> set[int]:
    steps = range(first, last)
    return {int(key) for step in steps for key in stream.batch(step).ids[feature]}


def test_batches_are_functions_of_the_seed_and_the_step() -> None:
    stream = DriftingClicks(30, 8, seed=3)
    for step, got in enumerate(stream.batches()):
        jax.tree.map(np.testing.assert_array_equal, stream.batch(step), got)
    other = DriftingClicks(30, 8, seed=4).batch(20)
    assert not set(other.ids["item"]) & set(stream.batch(20).ids["item"])


def test_items_die_and_users_come_back() -> None:
    stream = DriftingClicks(1000, 256, places=50, item_life=100, session=50, turns=2, returns=2)
    assert not ids_of(stream, "item", 0, 50) & ids_of(stream, "item", 201, 251)
    early, later = ids_of(stream, "user", 0, 20), ids_of(stream, "user", 110, 130)
    assert 0.2 < len(early & later) / len(early) < 0.9
    assert not early & ids_of(stream, "user", 251, 300)
    assert max(ids_of(stream, "user", 0, 9)) > 2**63  # ids have all 64 bits


def test_planted_probability_is_that_of_the_clicks() -> None:
    batches = list(DriftingClicks(60, 512).batches())
    labels = np.concatenate([batch.labels for batch in batches])
    best = np.concatenate([batch.best for batch in batches])
    p = 1 / (1 + np.exp(-best))
    for low in np.arange(0.1, 0.9, 0.1):
        chosen = (p >= low) & (p < low + 0.1)
        spread = np.sqrt(np.sum(p[chosen] * (1 - p[chosen])))
        assert abs(np.sum(labels[chosen] - p[chosen])) < 4 * spread + 1
    assert 0.75 < auc(best, labels) < 0.9


def test_tiers_predict_what_hash_tables_do() -> None:
    """Most rows leave the device in the meantime."""
    stream = DriftingClicks(24, 32, places=100, item_life=20, session=6)
    options: Any = argparse.Namespace(rows=1024, processes=1)
    alone = list(main.in_processes(options, stream))
    options.rows = 512
    np.testing.assert_array_equal(list(main.in_tiers(options, stream)), alone)
    assert len(ids_of(stream, "user", 0, 24)) > 128  # rows on the device


@pytest.mark.slow
def test_the_default_run_ends_with_the_same_predictions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the two processes that train together are others."""
    started = main.started

    def here(argv: list[str], out: Path, *more: str) -> Any:
        if "--processes" in more:
            return started(argv, out, *more)
        main.main([*argv, *more, "--out", str(out)])
        return SimpleNamespace(wait=lambda: 0), out

    monkeypatch.setattr(main, "started", here)
    main.main(["--steps", "6", "--batch-size", "16", "--rows", "256"])
    out = capsys.readouterr().out
    rows = re.findall(r"^(one process|two processes|with tiers) +(\S+) +(\S+) +\S+ ms$", out, re.M)
    assert [name for name, _, _ in rows] == ["one process", "two processes", "with tiers"]
    assert len({quality for _, quality, _ in rows}) == 1
    differences = [float(difference) for _, _, difference in rows]
    assert differences[0] == differences[2] == 0 and differences[1] < 1e-5
