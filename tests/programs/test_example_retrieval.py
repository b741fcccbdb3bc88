"""The retrieval example: files, recall, the four variants, a run that survives a kill, the report."""

import doctest
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

import orbax.checkpoint as ocp

from benchmarks.quality import reorder
from examples.retrieval import data, main, settings
from examples.retrieval.evaluate import Recall

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "pairs.txt.gz"
    data.write_synthetic(path, num_users=300, num_items=120, groups=6)
    return path


def arguments(log: Path, workdir: Path, *more: str) -> list[str]:
    tiny = ["--features", "8", "--tt-rank", "4", "--batch-size", "256", "--negatives", "16"]
    tiny += ["--epochs", "6", "--learning-rate", "0.02"]
    return ["--data", str(log), "--workdir", str(workdir), *tiny, *more]


def run(log: Path, workdir: Path, variant: str, *more: str) -> dict:
    """Trains in this process."""
    main.main(arguments(log, workdir, *more, "--worker", variant))
    return json.loads((workdir / variant / "result.json").read_text())


def parameters(workdir: Path, variant: str) -> dict[str, np.ndarray]:
    """All that the last checkpoint holds: tables, slots, steps."""
    with ocp.CheckpointManager((workdir / variant / "checkpoints").absolute()) as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore())
        state = manager.restore(manager.latest_step(), args=args)["state"]
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


# Files


def test_lists(tmp_path):
    for opener, suffix in ((open, ""), (gzip.open, ".gz"), (lzma.open, ".xz")):
        folder = tmp_path / f"lists{suffix}"
        folder.mkdir()
        files = folder / f"b_train.txt{suffix}", folder / f"b_test.txt{suffix}"
        for path, text in zip(files, ("7 50 60\n9 60 60 70\n", "7 70 80\n9\n8 50\n"), strict=True):
            with opener(path, "wt") as file:
                file.write(text)
        read = data.load(folder)
        assert (read.num_users, read.num_items) == (3, 4)  # 7, 8, 9 and 50, 60, 70, 80
        train = list(zip(read.train_users, read.train_items, strict=True))
        assert train == [(0, 0), (0, 1), (2, 1), (2, 2)]
        assert list(zip(read.test_users, read.test_items, strict=True)) == [(0, 2), (0, 3), (1, 0)]
        assert read.train_users.dtype == np.int32
        assert str(data.load(*files)) == str(read)


def test_pairs_leave_the_last_item_out(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("2 10\n1 30\n2 20\n1 10\n2 10\n3 10\n")
    read = data.load(path)
    # User 2 took item 10 twice: the first time counts. User 3 has one item, which stays in the train set.
    assert list(zip(read.train_users, read.train_items, strict=True)) == [(0, 2), (1, 0), (2, 0)]
    assert list(zip(read.test_users, read.test_items, strict=True)) == [(0, 0), (1, 1)]


def test_test_items_known_from_training_are_dropped(tmp_path):
    (tmp_path / "a_train.txt").write_text("1 1 2 3\n")
    (tmp_path / "a_test.txt").write_text("1 3 4\n")
    assert data.load(tmp_path).test_items.tolist() == [3]


def test_bad_files(tmp_path):
    for text, message in [
        ("1 2\n1 x\n", r"got '1 x' in its non-empty line 2; expected integers"),
        ("1 -2\n", "expected integers"),
        (f"1 {2**64}\n", "expected integers"),
        ("", "no train interactions"),
        ("5\n", "no train interactions"),
    ]:
        path = tmp_path / "bad.txt"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            data.load(path)
    path.write_text("1 2 3\n")
    with pytest.raises(ValueError, match="got the line '1 2 3'; expected 'user item'"):
        data.load(path, layout="pairs")
    with pytest.raises(ValueError, match="layout: got 'rows'"):
        data.load(path, layout="rows")
    with pytest.raises(ValueError, match="with 0 pairs of files"):
        data.load(tmp_path)


# Recall


def test_recall_against_sorting(log):
    read = data.load(log)
    rng = np.random.default_rng(0)
    users = rng.normal(size=(read.num_users, 5)).astype(np.float32)
    items = rng.normal(size=(read.num_items, 5)).astype(np.float32)
    values = []
    for user in np.unique(read.test_users):
        scores = items @ users[user]
        scores[read.train_items[read.train_users == user]] = -np.inf
        top = np.argsort(-scores)[:7]
        values.append(np.mean(np.isin(read.test_items[read.test_users == user], top)))
    recall = Recall(read, k=7)
    assert recall.num_users == len(values)
    assert recall(lambda ids: jnp.asarray(users)[ids], jnp.asarray(items)) == pytest.approx(
        np.mean(values)
    )


def test_recall_over_several_blocks_and_on_some_users(monkeypatch, log):
    monkeypatch.setattr(
        "examples.retrieval.evaluate._BLOCK", 64
    )  # 300 users: four full blocks and a part of one
    read = data.load(log)
    perfect = np.zeros((read.num_users, read.num_items), np.float32)
    perfect[read.test_users, read.test_items] = 1.0
    rows = jnp.asarray(perfect)
    assert Recall(read, k=1)(lambda ids: rows[ids], jnp.eye(read.num_items)) == 1.0
    assert Recall(read, k=1, max_users=70)(lambda ids: rows[ids], jnp.eye(read.num_items)) == 1.0
    assert Recall(read, k=1)(lambda ids: -rows[ids], jnp.eye(read.num_items)) == 0.0
    assert Recall(read, max_users=70).num_users == 70


# Training


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dense_optax", "tt_fused"])
def test_learns(log, tmp_path, variant):
    result = run(log, tmp_path, variant, "--epochs", "12", "--k", "10")
    # Chance is 10 of about 110 items.
    assert result["recall"] > 0.2, result["loss_curve"]
    assert result["loss_curve"][-1] < 0.9 * result["loss_curve"][0]
    assert (
        result["compression"] > 1
        if settings.VARIANTS[variant].table == "tt"
        else result["compression"] == 1
    )
    assert result["test_users"] == 300
    assert [epoch for epoch, _ in result["recall_curve"]] == [5, 10]


@pytest.mark.slow
def test_orders_of_ids(log, tmp_path):
    """The order is used, saved, and counted in the bytes; dense tables have none."""
    result = run(log, tmp_path, "tt_fused", "--order", "interactions", "--epochs", "2")
    read = data.load(log)
    assert result["bytes"] == 4 * result["parameters"] + 2 * (read.num_users + read.num_items)
    saved = [
        value for name, value in parameters(tmp_path, "tt_fused").items() if "id_order" in name
    ]
    assert sorted(map(len, saved)) == sorted([read.num_users, read.num_items])
    for rows in saved:
        assert not np.array_equal(rows, np.arange(len(rows)))
        assert np.array_equal(np.sort(rows), np.arange(len(rows)))
    dense = settings.parse([*arguments(log, tmp_path), "--order", "counts"])
    assert settings.config(dense, "dense_fused").order == "none"


FIGURES = dict.fromkeys(("bytes", "state_bytes", "parameters"), 100)
FIGURES |= {"recall": 0.1, "compression": 2.0, "step_ms": 1.0, "test_users": 3}


@pytest.mark.slow
def test_a_killed_command_ends_with_the_same_bits_and_compares(log, tmp_path, monkeypatch, capsys):
    """Of the two variants, one is trained, in a process that is killed and in one that continues."""
    workdir, variant, measure = tmp_path / "killed", "tt_optax", main._measure
    more = ["--quick", "--epochs", "10", "--variants", f"dense_fused,{variant}"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-m", "examples.retrieval.main", *arguments(log, workdir, *more)]
    process = subprocess.Popen([*command, "--worker", variant], stderr=subprocess.PIPE)
    checkpoints = workdir / variant / "checkpoints"

    def saved() -> int:
        return max((int(p.name) for p in checkpoints.glob("*") if p.name.isdigit()), default=0)

    while process.poll() is None and saved() < 2:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    _, stderr = process.communicate()
    assert process.returncode == -signal.SIGKILL and saved() < 10, stderr

    def instead(workdir: Path, which: str, argv: list[str]) -> dict:
        return measure(workdir, which, argv) if which == variant else {"variant": which, **FIGURES}

    monkeypatch.setattr(main, "_measure", instead)
    main.main(arguments(log, workdir, *more))
    whole = run(log, tmp_path / "whole", variant, *more)
    expected, found = (parameters(tmp_path / name, variant) for name in ("whole", "killed"))
    assert len(expected) >= 2 and expected.keys() == found.keys()
    for name, value in expected.items():
        assert np.array_equal(value, found[name]), name
    table = (workdir / "comparison.txt").read_text()
    assert table in capsys.readouterr().out
    assert "dense fused" in table and "TT + optax" in table and "recall@20" in table
    figures = json.loads((workdir / "comparison.json").read_text())
    known, resumed = figures["results"]
    assert (known["variant"], resumed["variant"]) == ("dense_fused", variant)
    assert resumed["loss_curve"] == whole["loss_curve"]
    assert resumed["recall"] == whole["recall"]


def test_a_run_continues_under_its_own_settings_only(log, tmp_path):
    run(log, tmp_path, "tt_fused", "--epochs", "1")
    with pytest.raises(SystemExit, match=r"other settings \(old, new\): \{'l2': \([\d.]+, 0.5\)\}"):
        run(log, tmp_path, "tt_fused", "--epochs", "1", "--l2", "0.5")
    other = tmp_path / "other.txt"
    data.write_synthetic(other, num_users=300, num_items=120, groups=6, seed=1)
    with pytest.raises(SystemExit, match=r"holds a run with another data file.*another --workdir"):
        run(other, tmp_path, "tt_fused", "--epochs", "1")
    assert len(run(log, tmp_path, "tt_fused", "--epochs", "1")["loss_curve"]) == 1


# The command line


def test_command_line_errors(capsys):
    for more, message in [
        (["--variants", "sparse"], "--variants: got 'sparse'; expected some of dense_optax"),
        (["--tt-rank", "0"], "--tt-rank: got 0; expected at least 1"),
        (["--data", "absent"], "--data: absent does not exist; expected a file of interactions"),
        (["--test", "absent"], "--test: absent does not exist"),
    ]:
        with pytest.raises(SystemExit):
            settings.parse(["--data", str(Path(__file__)), *more])
        assert message in capsys.readouterr().err


def test_every_variant_has_settings():
    for variant in settings.VARIANTS:
        for more in ([], ["--quick"]):
            options = settings.parse(["--data", ".", "--order", "counts", *more])
            config = settings.config(options, variant)
            assert config.epochs > 0
            assert config.order == ("counts" if variant.startswith("tt") else "none")


def test_every_variant_has_a_line():
    results = [{"variant": variant, **FIGURES} for variant in settings.VARIANTS]
    lines = main.table(results, 20).splitlines()
    assert len(lines) == 1 + len(results) + 1 and "TT + optax" in lines[3]
    assert len({len(line) for line in lines[:-1]}) == 1


def test_readme():
    failed, tried = doctest.testfile(
        str(ROOT / "examples/retrieval/README.md"), module_relative=False
    )
    assert failed == 0 < tried


@pytest.mark.slow
def test_reordering_in_the_middle(log: Path, tmp_path: Path) -> None:
    """Both ways go on from the same epoch, and what is lost is reported."""
    out = tmp_path / "figures.json"
    tiny = ["--features", "8", "--tt-rank", "4", "--batch-size", "256"]
    reorder.main(["--data", str(log), "--at", "1", "--epochs", "2", *tiny, "--out", str(out)])
    figures = json.loads(out.read_text())
    assert 0 < figures["users_error"] < 1 and 0 < figures["items_error"] < 1
    for name in ("before", "right_after", "reordered", "as_it_was"):
        assert 0 <= figures[name] <= 1
    with pytest.raises(SystemExit):
        reorder.parse(["--data", str(log), "--at", "4", "--epochs", "4"])
