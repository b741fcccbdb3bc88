"""Recall against bytes: the small kinds of tables, the points and their file, table, picture and page."""

import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from flax import nnx

import jax_tt
from examples.retrieval import curve, curve_report, data, settings, tables
from examples.retrieval.train import train

ROOT = Path(__file__).parents[1]
SMALL = {"low_rank", "hashing", "quotient_remainder"}


@pytest.fixture(scope="module", autouse=True)
def promotion_of_a_user() -> Iterator[None]:
    """The suite's strict promotion is for our own operations; optax needs the usual rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    data.write_synthetic(path / "groups.txt.gz", num_users=300, num_items=120, groups=6)
    return path


def make(kind: str, rows: int, features: int, ratio: float):
    return tables.make_table(
        kind,
        rows,
        features,
        std=0.5,
        optimizer=None,
        ratio=ratio,
        tt_ranks=16,
        order=lambda shape: None,
        rngs=nnx.Rngs(0),
    )


# Tables


@pytest.mark.parametrize("kind", [*sorted(SMALL), "tt", "tt2"])
@pytest.mark.parametrize(("rows", "features", "ratio"), [(997, 24, 3.0), (2000, 16, 10.0)])
def test_tables_use_their_budget_and_keep_it(kind, rows, features, ratio):
    """The tables are as large as the ratio allows, but for one step of what determines their size."""
    size = sum(array.size for array in tables.arrays(make(kind, rows, features, ratio)))
    two = jax_tt.TTShape.suggest(rows, features, 1, d=2).row_factors
    step = {
        "low_rank": rows + features,
        "tt": 0.15 * rows * features / ratio,
        "tt2": two[0] * features + two[1],
    }
    budget = rows * features / ratio
    assert budget - 2 * step.get(kind, features) < size <= budget


def test_low_rank_is_a_product():
    table = make("low_rank", 50, 12, 3.0)
    rows, basis = (np.asarray(array, np.float64) for array in table.arrays())
    assert rows.shape == (50, 3) and basis.shape == (3, 12)
    ids = np.array([0, 49, 7, 7])
    np.testing.assert_allclose(table(jnp.asarray(ids)), (rows @ basis)[ids], rtol=1e-5, atol=1e-6)
    assert tables.lookup(table, jnp.zeros(0, jnp.int32)).shape == (0, 12)


def test_hashing_shares_the_row_of_the_hash():
    table = make("hashing", 1000, 6, 8.0)
    (rows,) = (np.asarray(array) for array in table.arrays())
    ids = np.arange(1000)
    row = np.array([murmur(i) % 125 for i in range(1000)])
    assert np.array_equal(table(jnp.asarray(ids)), rows[row])
    # As even as balls thrown at random: about 125 / e^8 rows are empty.
    assert np.bincount(row, minlength=125).max() < 25 and len(set(row)) > 120


def murmur(x: int) -> int:
    """The finaliser of MurmurHash3 in exact integers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def test_quotient_remainder_gives_every_id_a_row_of_its_own():
    table = make("quotient_remainder", 1001, 5, 4.0)
    quotient, remainder = (np.asarray(array, np.float64) for array in table.arrays())
    ids = np.arange(1001)
    expected = quotient[ids // len(remainder)] * remainder[ids % len(remainder)]
    found = np.asarray(table(jnp.asarray(ids)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len(np.unique(found, axis=0)) == 1001


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 100, 101, 997])
@pytest.mark.parametrize("ratio", [1.1, 2.0, 4.5])
def test_remainders_against_trying_all(rows, ratio):
    budget = int(rows / ratio)
    fit = [m for m in range(1, rows + 1) if m + -(-rows // m) <= budget]
    if fit:
        assert tables.remainders(rows, ratio) == max(fit)
    else:
        with pytest.raises(ValueError, match="expected a smaller ratio"):
            tables.remainders(rows, ratio)


@pytest.mark.parametrize("kind", [*sorted(SMALL), "tt", "tt2"])
def test_tables_that_are_too_small(kind):
    with pytest.raises(ValueError, match=f"ratio: got 200 for {kind}, but .*expected a smaller"):
        tables.check_fits(kind, 100, 8, 200.0)
    with pytest.raises(ValueError, match=r"ratio: got 1\.0; expected a number above 1"):
        tables.check_fits(kind, 100, 8, 1.0)
    tables.check_fits(kind, 100, 8, 3.0)
    if kind in SMALL:
        with pytest.raises(ValueError, match="ratio: got None for"):
            tables.check_fits(kind, 100, 8, None)


def test_two_cores_of_both_tables_take_the_same_bytes():
    """Together they keep the ratio, whatever the numbers of rows."""
    sizes = (7000, 2500)
    ratios = tables.split_ratio("tt2", sizes, 10.0)
    shapes = [tables.tt2_shape(n, 64, ratio) for n, ratio in zip(sizes, ratios, strict=True)]
    budget = sum(sizes) * 64 / 10
    assert 0.85 * budget < sum(shape.num_params for shape in shapes) <= budget
    assert 0.85 < shapes[0].num_params / shapes[1].num_params < 1.15
    assert tables.split_ratio("low_rank", sizes, 10.0) == [10.0, 10.0]


@pytest.mark.parametrize("kind", ["dense", "tt", "tt2", "low_rank"])
def test_tables_start_from_rows(kind):
    """Rows that the kind can hold, two distinct ones in a table of one vector each, are held to rounding."""
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(2, 6)), [40, 60], axis=0).astype(np.float32)
    mixed = jax_tt.order.IdOrder(rng.permutation(100))
    table = tables.make_table(
        kind,
        100,
        6,
        std=0.5,
        optimizer=None,
        ratio=None if kind == "dense" else 2.0,
        tt_ranks=4,
        order=lambda shape: mixed,
        start=rows[mixed.rows],
        rngs=nnx.Rngs(0),
    )
    found = tables.lookup(table, jnp.arange(100))
    np.testing.assert_allclose(found, rows[mixed.rows], rtol=1e-4, atol=1e-4)


def test_initial_rows_have_the_same_length():
    for kind in (*sorted(SMALL), "tt", "tt2"):
        table = make(kind, 3000, 64, 4.0)
        rows = tables.lookup(table, jnp.arange(3000))
        assert 0.4 < float(jnp.std(rows)) < 0.6, kind


@pytest.mark.parametrize("variant", sorted(SMALL))
def test_learns(folder, tmp_path, variant):
    interactions = data.load(folder / "groups.txt.gz")
    arguments = ["--data", "x", "--ratio", "4", "--features", "8", "--epochs", "12", "--l2", "0.01"]
    arguments += ["--batch-size", "256", "--negatives", "16", "--learning-rate", "0.03"]
    options = settings.parse([*arguments, "--variants", variant])
    result = train(settings.config(options, variant), interactions, tmp_path / "run", k=10)
    assert result["loss_curve"][-1] < 0.97 * result["loss_curve"][0]
    assert 4 <= result["compression"] < 8 and result["order_bytes"] == 0
    # Chance is 10 of about 110 items; ids that share a row by chance hold a user back.
    assert result["recall"] > (0.1 if variant == "hashing" else 0.15)


@pytest.mark.parametrize("variant", ["dense_fused", "tt2_fused"])
def test_a_spectral_start_knows_the_groups_before_training(folder, tmp_path, variant):
    interactions = data.load(folder / "groups.txt.gz")
    arguments = ["--data", "x", "--ratio", "4", "--features", "8", "--epochs", "1"]
    arguments += ["--batch-size", "256", "--negatives", "16", "--learning-rate", "1e-6"]
    arguments += ["--order", "start", "--start", "spectral", "--variants", variant]
    options = settings.parse(arguments)
    result = train(settings.config(options, variant), interactions, tmp_path / "run", k=10)
    # Of the 20 items of a user's group 10 are found by guessing among them.
    assert result["recall"] > 0.3


# Data sets


def test_data_sets_of_a_folder(tmp_path):
    for name in ("b_train.txt.xz", "b_test.txt.xz", "log.txt.gz", "plain.txt", "README.md"):
        with lzma.open(tmp_path / name, "wt") as file:
            file.write("1 2\n")
    assert data.data_sets(tmp_path) == {
        "b": (tmp_path / "b_train.txt.xz", tmp_path / "b_test.txt.xz"),
        "log": (tmp_path / "log.txt.gz", None),
        "plain": (tmp_path / "plain.txt", None),
    }
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected interaction files"):
        data.data_sets(tmp_path / "empty")


# The command


TINY = ["--features", "8", "--epochs", "1", "--batch-size", "256", "--negatives", "16"]


def command(folder: Path, out: Path, *more: str) -> None:
    curve.main(["--data", str(folder), "--out", str(out), *TINY, *more])


@pytest.fixture
def trained(monkeypatch):
    """Replaces training; the recall of a run is a known function of its settings. Lists the runs."""
    runs = []

    def instead(config, interactions, workdir):
        workdir.mkdir(parents=True)
        runs.append((config, len(interactions.train_users)))
        recall = 0.1 + 0.01 * config.seed + (config.l2 == 1e-3) + config.learning_rate
        order = 4 * 420 if config.order != "none" else 0
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
    return runs


def test_trains_what_is_missing_and_nothing_twice(folder, tmp_path, trained, capsys):
    out = tmp_path / "out"
    command(folder, out, "--seeds", "1", "--ratios", "2", "4")
    assert len(trained) == 2 + 2 * 8
    assert not any((out / "points").iterdir())  # the runs of finished points are gone
    command(folder, out, "--seeds", "2", "--ratios", "4")
    assert len(trained) == 18 + 10  # the new seed alone
    command(folder, out, "--seeds", "2", "--ratios", "4")
    assert len(trained) == 28
    command(folder, out, "--seeds", "1", "--ratios", "4", "--epochs", "2", "--methods", "dense")
    assert len(trained) == 29 and trained[-1][0].epochs == 2  # other settings, another point
    assert len(json.loads((out / curve.RESULTS).read_text())["points"]) == 29


def test_a_stopped_command_keeps_what_it_finished(folder, tmp_path, trained, monkeypatch):
    known = curve.train_alone

    def stop(config, interactions, workdir):
        if config.order == "interactions":
            raise KeyboardInterrupt
        return known(config, interactions, workdir)

    monkeypatch.setattr(curve, "train_alone", stop)
    with pytest.raises(KeyboardInterrupt):
        command(folder, tmp_path, "--seeds", "1", "--ratios", "4")
    assert len(trained) == 3
    monkeypatch.setattr(curve, "train_alone", known)
    command(folder, tmp_path, "--seeds", "1", "--ratios", "4")
    assert len(trained) == 10


def test_leaves_out_what_cannot_be_that_small(folder, tmp_path, trained, capsys):
    command(folder, tmp_path, "--seeds", "1", "--ratios", "20", "--methods", "dense", "low_rank")
    assert [run.variant for run, _ in trained] == ["dense_fused"]
    assert "groups: leaves low_rank out: ratio: got 20 for low_rank" in capsys.readouterr().out


def test_tunes_all_methods_alike_on_train_items(folder, tmp_path, trained):
    methods = ("dense", "tt", "hashing")
    command(folder, tmp_path, "--tune", "--seeds", "2", "--ratios", "2", "4", "--methods", *methods)
    whole = len(data.load(folder / "groups.txt.gz").train_users)
    tuning = [run for run, size in trained if size < whole]
    points = [run for run, size in trained if size == whole]
    tried = {(run.variant, run.ratio, run.learning_rate, run.l2): run.seed == 0 for run in tuning}
    assert all(tried.values()) and len(tuning) == len(tried) == 3 * 6
    assert {key[:2] for key in tried} == {
        ("dense_fused", None),
        ("tt_fused", 4.0),
        ("hashing", 4.0),
    }
    # The replaced training makes this pair the best one.
    assert {(run.learning_rate, run.l2) for run in points} == {(1e-2, 1e-3)}
    assert len(points) == 2 * (1 + 2 * 2)
    text = (tmp_path / "curve.md").read_text()
    assert len(text.splitlines()) == 2 + 5  # no line of the table is a run of the tuning


def test_one_real_point(folder, tmp_path):
    """The order takes its bytes, and training leaves nothing behind but the figures."""
    command(folder, tmp_path, "--seeds", "1", "--ratios", "3", "--methods", "tt_order")
    (row,) = json.loads((tmp_path / curve.RESULTS).read_text())["points"].values()
    assert row["order_bytes"] == 4 * (300 + 120)
    assert row["bytes"] == 4 * row["parameters"] + row["order_bytes"]
    assert 3 * row["parameters"] <= 8 * (300 + 120)
    assert 0 <= row["recall"] <= 1 and not any((tmp_path / "points").iterdir())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ratios", "1"], "--ratios: got 1.0; expected numbers above 1"),
        (["--seeds", "0"], "--seeds: got 0; expected at least 1"),
    ],
)
def test_command_line_errors(capsys, more, message):
    with pytest.raises(SystemExit):
        curve.parse(["--data", "folder", *more])
    assert message in capsys.readouterr().err


def test_unknown_data_set(folder, tmp_path):
    with pytest.raises(SystemExit, match=r"got \['book'\]; expected some of \['groups'\]"):
        command(folder, tmp_path, "--datasets", "book")


# Table and picture


def test_means_and_spread_against_numpy(folder, tmp_path, trained):
    command(folder, tmp_path, "--seeds", "3", "--ratios", "2", "4")
    rows = list(json.loads((tmp_path / curve.RESULTS).read_text())["points"].values())
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
    assert len(lines) == 2 + 2 + 2 * 8
    dense, ordered = lines[2], lines[4]
    assert re.search(r"dense \| 0\.\d{4} ± 0\.0100 \| 100% \| 3 \| 13,440 \| 1\.0 \|  \|$", dense)
    assert "| 6,720 | 2.0 | 1.6 |" in ordered  # 13,440 / (6,720 + 1,680)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_one_seed_has_no_spread(folder, tmp_path, trained):
    command(folder, tmp_path, "--seeds", "1", "--methods", "hashing", "--ratios", "4")
    line = (tmp_path / "curve.md").read_text().splitlines()[-1]
    assert "±" not in line and "| 1 |" in line and "%" not in line  # no dense table to compare with


def test_the_page_shows_the_results_file():
    from docs import make_how_small

    page = make_how_small.PAGE.read_text()
    assert page == make_how_small.fill(page)
