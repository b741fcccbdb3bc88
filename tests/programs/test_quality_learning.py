"""Recall by epoch: what is trained, the file that is continued, the table and the picture."""

import json
from pathlib import Path

import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from benchmarks.quality import curve, learning
from examples.retrieval import data


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    data.write_synthetic(path / "taste.txt.gz", num_users=60, num_items=40, groups=4)
    monkeypatch.setattr(learning, "_GROUPS", {"num_users": 50, "num_items": 30, "groups": 3})
    return path


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """What would have been trained; dense tables learn slowly, others start with half and stay there."""
    runs: list[str] = []

    def train(config, interactions, workdir, *, test_users, evaluate_every, evaluate_start):
        assert evaluate_every == 1 and evaluate_start and not workdir.exists()
        runs.append(config.variant)
        slow = config.variant == "dense_fused"
        recall = [[epoch, epoch / 10 if slow else 0.2] for epoch in range(config.epochs + 1)]
        return {"recall_curve": recall}

    monkeypatch.setattr(curve, "train_alone", train)
    return runs


def test_every_method_once_on_every_data_set(folder, tmp_path, trained, capsys):
    out, picture = tmp_path / "learning.json", tmp_path / "learning.png"
    command = ["--data", str(folder), "--out", str(out), "--picture", str(picture), "--epochs", "4"]
    learning.main(command)
    assert len(trained) == 2 * len(learning.METHODS)
    runs = json.loads(out.read_text())["runs"]
    assert {run["data_set"] for run in runs.values()} == {"taste", "groups"}
    assert picture.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "| taste | dense | 2 | 0.4000 |" in printed
    assert "| groups | sum of TTs, spectral start | 0 | 0.2000 |" in printed
    del runs["groups: tt"]
    out.write_text(json.dumps({"runs": runs}))
    learning.main(command)
    assert len(trained) == 2 * len(learning.METHODS) + 1 and trained[-1] == "tt_fused"


def test_epochs_to_a_goal():
    recall = [[0, 0.1], [1, 0.05], [2, 0.3]]
    assert [learning.epochs_to(recall, goal) for goal in (0.1, 0.2, 0.3, 0.4)] == [0, 2, 2, None]
