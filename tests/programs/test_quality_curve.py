"""Recall against bytes: the points and their file, tuning and teachers, table, picture and page."""

import json
import lzma
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from benchmarks.quality import curve, curve_report, data_sets
from benchmarks.quality.train import train
from examples.retrieval import data
from examples.retrieval.train import Checkpoints

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    data.write_synthetic(path / "groups.txt.gz", num_users=300, num_items=120, groups=6)
    return path


# Data sets


def test_data_sets_of_a_folder(tmp_path):
    for name in ("b_train.txt.xz", "b_test.txt.xz", "log.txt.gz", "plain.txt", "README.md"):
        with lzma.open(tmp_path / name, "wt") as file:
            file.write("1 2\n")
    assert data_sets.data_sets(tmp_path) == {
        "b": (tmp_path / "b_train.txt.xz", tmp_path / "b_test.txt.xz"),
        "log": (tmp_path / "log.txt.gz", None),
        "plain": (tmp_path / "plain.txt", None),
    }
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected interaction files"):
        data_sets.data_sets(tmp_path / "empty")


# The command


TINY = ["--features", "8", "--epochs", "1", "--batch-size", "256", "--negatives", "16"]


def command(folder: Path, out: Path, *more: str) -> None:
    curve.main(["--data", str(folder), "--out", str(out), *TINY, *more])


def points_of(out: Path) -> list[dict[str, Any]]:
    return list(json.loads((out / curve.RESULTS).read_text())["points"].values())


class Run(NamedTuple):
    """A call of the replaced training.

    Attributes:
        config: its settings.
        pairs: train interactions that it sees.
        start: index of the run whose rows it starts from.
        saves: it saves rows.
    """

    config: curve.Config
    pairs: int
    start: int | None
    saves: bool


@pytest.fixture
def trained(monkeypatch):
    """Replaces training and the picture; the recall of a run is a known function of its settings. Lists the runs."""
    runs: list[Run] = []

    def instead(config, interactions, workdir, *, trained, save_rows):
        workdir.mkdir(parents=True)
        start = None if trained is None else int(trained["users"])
        if save_rows is not None:
            save_rows.parent.mkdir(exist_ok=True)
            np.savez(save_rows, users=len(runs), items=len(runs))
        runs.append(Run(config, len(interactions.train_users), start, save_rows is not None))
        recall = 0.1 + 0.01 * config.seed + (config.l2 == 0.2) + config.learning_rate
        order = 2 * 420 if config.order != "none" else 0
        size = 13_440 if config.ratio is None else int(13_440 / config.ratio)
        return {
            "recall": recall,
            "test_users": 300,
            "parameters": size // 4,
            "bytes": size + order,
            "order_bytes": order,
            "config": asdict(config),
        }

    monkeypatch.setattr(curve, "train_alone", instead)
    monkeypatch.setattr(curve_report, "picture", lambda *_: None)
    return runs


def test_trains_what_is_missing_and_nothing_twice(folder, tmp_path, trained):
    out = tmp_path / "out"
    command(folder, out, "--seeds", "1", "--ratios", "2", "4")
    sized = len(curve.METHODS) - 4  # tables with a row for each id have no ratio
    assert len(trained) == 4 + 2 * sized
    assert not any((out / "points").iterdir())  # the runs of finished points are gone
    command(folder, out, "--seeds", "2", "--ratios", "4")
    assert len(trained) == 8 + 3 * sized  # the new seed alone
    command(folder, out, "--seeds", "2", "--ratios", "4")
    assert len(trained) == 8 + 3 * sized
    command(folder, out, "--seeds", "1", "--ratios", "4", "--epochs", "2", "--methods", "dense")
    assert trained[-1].config.epochs == 2  # other settings, another point
    assert len(points_of(out)) == len(trained) == 9 + 3 * sized


def test_tunes_all_methods_alike_on_train_items(folder, tmp_path, trained):
    methods = ("dense", "tt", "hashing")
    command(folder, tmp_path, "--tune", "--seeds", "2", "--ratios", "2", "4", "--methods", *methods)
    whole = len(data.load(folder / "groups.txt.gz").train_users)
    tuning = [run.config for run in trained if run.pairs < whole]
    points = [run.config for run in trained if run.pairs == whole]
    tried = {(run.variant, run.ratio, run.learning_rate, run.l2): run.seed == 0 for run in tuning}
    assert all(tried.values()) and len(tuning) == len(tried) == 3 * 6
    assert {key[:2] for key in tried} == {
        ("dense_fused", None),
        ("tt_fused", 2.0),
        ("hashing", 2.0),
    }
    # The replaced training makes this pair the best one: the larger multiple of the method's own learning rate.
    assert {(run.variant, run.learning_rate, run.l2) for run in points} == {
        ("dense_fused", 3 * 9e-3, 0.2),
        ("tt_fused", 3 * 5e-3, 0.2),
        ("hashing", 3 * 3e-3, 0.2),
    }
    assert len(points) == 2 * (1 + 2 * 2)
    text = (tmp_path / "curve.md").read_text()
    assert len(text.splitlines()) == 2 + 5  # no line of the table is a run of the tuning


def test_command_line_errors(capsys):
    for more, message in [
        (["--ratios", "1"], "--ratios: got 1.0; expected numbers above 1"),
        (["--seeds", "0"], "--seeds: got 0; expected at least 1"),
    ]:
        with pytest.raises(SystemExit):
            curve.parse(["--data", "folder", *more])
        assert message in capsys.readouterr().err


# Teachers


def test_points_start_from_the_rows_of_their_teacher_at_the_same_seed(folder, tmp_path, trained):
    methods = ("tt_residual", "low_rank_trained_spectral", "hashing")
    command(folder, tmp_path, "--seeds", "2", "--ratios", "2", "4", "--methods", *methods)
    pupils = [run for run in trained if run.start is not None]
    assert len(pupils) == 2 * 2 * 2 and len(trained) == len(pupils) + 2 * 2 + 2 * 2
    for run in pupils:
        teacher = trained[run.start]
        assert teacher.config.variant == "dense_fused" and teacher.config.seed == run.config.seed
        spectral = run.config.variant == "low_rank"
        assert teacher.config.start == ("spectral" if spectral else "random")
    for run in trained:
        assert run.saves == (run.config.variant == "dense_fused")
    # Teachers are points as any other: whoever asks for them later finds them.
    command(folder, tmp_path, "--seeds", "2", "--methods", "dense", "dense_spectral")
    assert len(trained) == 16


@pytest.mark.slow
def test_a_real_pupil_continues_from_its_checkpoint(folder, tmp_path, monkeypatch):
    """It is as small as asked with its orders, and stopped after an epoch it ends as one that was not stopped."""
    save = Checkpoints.save

    def stop(run: Checkpoints, epoch: int, *state: Any) -> None:
        save(run, epoch, *state)
        raise KeyboardInterrupt

    monkeypatch.setattr(curve, "train_alone", train)
    chosen = ["--seeds", "1", "--ratios", "4", "--epochs", "2", "--methods"]
    command(folder, tmp_path / "stopped", *chosen, "dense")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", stop)
        command(folder, tmp_path / "stopped", *chosen, "tt_residual")
    command(folder, tmp_path / "stopped", *chosen, "tt_residual")
    shutil.copytree(tmp_path / "stopped" / "rows", tmp_path / "whole" / "rows")
    command(folder, tmp_path / "whole", *chosen, "tt_residual")
    (whole,) = points_of(tmp_path / "whole")
    _, resumed = points_of(tmp_path / "stopped")
    assert resumed == whole
    budget = 4 * 8 * (300 + 120) / 4
    assert 0.6 * budget < whole["bytes"] <= budget
    assert whole["bytes"] == 2 * whole["parameters"] + whole["order_bytes"]
    assert whole["order_bytes"] >= 2 * (300 + 120) and whole["recall"] > 0


# Table and picture


def test_means_and_spread_against_numpy(folder, tmp_path, trained, monkeypatch):
    command(folder, tmp_path, "--seeds", "3", "--ratios", "2", "4")
    rows = points_of(tmp_path)
    assert {row["method"] for row in rows} == set(curve.METHODS)
    for point in curve_report.means(rows):
        recalls = [
            row["recall"]
            for row in rows
            if (row["method"], row["config"]["ratio"]) == (point.method, point.ratio)
        ]
        assert point.seeds == len(recalls) == 3
        np.testing.assert_allclose(point.recall, np.mean(recalls), rtol=1e-12)
        np.testing.assert_allclose(point.spread, np.std(recalls, ddof=1), rtol=1e-12)
    lines = curve_report.table(rows).splitlines()
    whole = [method for method in curve.METHODS if curve._is_whole(method)]
    assert len(lines) == 2 + len(whole) + 2 * (len(curve.METHODS) - len(whole))
    dense, pupil = lines[2], lines[2 + len(whole)]
    assert re.search(r"dense \| \d\.\d{4} ± 0\.0100 \| 100% \| 3 \| 13,440 \| 1\.0 \|  \|$", dense)
    assert "| sum of TTs from dense, 16 bits |" in pupil
    assert pupil.endswith("| 6,720 | 2.0 | 1.8 |")  # 13,440 / (6,720 + 840)
    monkeypatch.undo()
    curve_report.picture(tmp_path / "curve.png", rows)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_the_results_file():
    from docs import make_how_small

    page = make_how_small.PAGE.read_text()
    assert page == make_how_small.fill(page)
