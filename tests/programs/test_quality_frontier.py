"""Small tables made from trained ones: their sizes, their finetuning, and the file of points."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")

import jax_tt
from benchmarks.quality import frontier, frontier_report, least_squares
from benchmarks.quality.distill import distill
from benchmarks.quality.frontier_tables import METHODS, Source, of_bits, of_table
from examples.retrieval import data
from tests.helpers import to_dense

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

RNG = np.random.default_rng(0)
ROWS = (RNG.normal(size=(400, 4)) @ RNG.normal(size=(4, 16))).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    data.write_synthetic(path / "groups.txt.gz", num_users=300, num_items=100, groups=5)
    return path


def source() -> Source:
    weights = RNG.uniform(0.5, 1.0, len(ROWS))
    return Source(ROWS, weights, lambda rows: -float(np.sum((rows - ROWS) ** 2)), seed=0)


@pytest.mark.slow(but="auto")
@pytest.mark.parametrize("method", [name for name in METHODS if name != "faiss_product"])
def test_tables_are_as_small_as_they_say(method):
    if method.startswith("faiss"):
        pytest.importorskip("faiss")
    budget = ROWS.nbytes // 8
    made = METHODS[method](source(), budget)
    assert 0 < made.nbytes <= budget
    rows = made.dense()
    assert rows.shape == ROWS.shape
    if method not in ("hashing", "quotient_remainder"):
        assert np.sum((rows - ROWS) ** 2) < 0.5 * np.sum(ROWS**2)


def test_numbers_of_a_few_bits_are_those_of_the_library():
    for bits, options in ((4, {}), (3, {"levels": "fit", "rotation": "fit"})):
        table, state = jax_tt.quantize(ROWS, bits, **options)
        made = of_table(table, state, "3 bits") if options else of_bits(ROWS, bits)
        assert made.nbytes == table.nbytes
        assert {"scale", "offset"} <= set(made.params) and ("rotation" in made.params) == bool(
            options
        )
        np.testing.assert_allclose(made.dense(), to_dense(table, state), rtol=1e-5, atol=1e-5)


def test_distilling_brings_scores_closer(folder):
    interactions = data.load(folder / "groups.txt.gz")
    users, items = (
        RNG.normal(size=(n, 16)).astype(np.float32)
        for n in (interactions.num_users, interactions.num_items)
    )
    made = of_bits(users, 2), of_bits(items, 2)

    def cross_entropy(own):
        wanted = jax.nn.softmax(jnp.asarray(users) @ items.T)
        return -float(jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(own[0] @ own[1].T), axis=1)))

    options = {"learning_rate": 1e-2, "epochs": 2, "batch_size": 256, "negatives": 32}
    found = distill(made, (users, items), interactions, **options)
    rows = [one.dense(params) for one, params in zip(made, found, strict=True)]
    assert cross_entropy(rows) < cross_entropy([one.dense() for one in made])
    again = distill(made, (users, items), interactions, **options)
    jax.tree.map(np.testing.assert_array_equal, found, again)


def test_rows_by_least_squares_minimise_the_weighted_errors():
    ids, partners = RNG.integers(0, 9, 40), RNG.integers(0, 30, 40)
    ids[ids == 4] = 5  # one row without partners
    others = RNG.normal(size=(30, 3))
    found = least_squares.fitted(ids, partners, 10, others)
    assert (found[[4, 9]] == 0).all()

    def error(rows):
        scores = rows @ others.T
        of_partners = jnp.sum((1 - scores[ids, partners]) ** 2)
        of_all = least_squares._OTHERS * jnp.sum(scores**2)
        degrees = np.bincount(ids, minlength=10) + least_squares._OTHERS * len(others)
        return of_partners + of_all + least_squares._L2 * jnp.sum(degrees[:, None] * rows**2)

    gradient = jax.grad(error)(jnp.asarray(found))
    np.testing.assert_allclose(gradient, np.zeros_like(found), atol=1e-4)


@pytest.mark.slow
def test_points_are_measured_once(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(frontier, "EPOCHS", 1)
    out, teachers = tmp_path / "points.json", tmp_path / "teachers"
    teachers.mkdir()
    interactions = data.load(folder / "groups.txt.gz")
    users, items = (
        RNG.normal(size=(n, 16)).astype(np.float32)
        for n in (interactions.num_users, interactions.num_items)
    )
    for seed in range(2):
        np.savez(teachers / f"groups-{seed}.npz", users=users, items=items)
    arguments = [f"--data={folder}", f"--teachers={teachers}", f"--out={out}", "--ratios", "4"]
    arguments += ["--methods", "low_rank", "rounding"]
    frontier.main(arguments)
    points = json.loads(out.read_text())["points"].values()
    assert [one["method"] for one in points] == ["low_rank", "rounding"]
    first = next(iter(points))
    assert first["bytes"] <= first["dense_bytes"] / 4
    assert 0 < first["agreement"] <= 1
    text = frontier_report.table(list(points))
    assert text in capsys.readouterr().out
    share = first["recall"] / first["dense_recall"]
    assert f"| groups | low rank | {share:.1%} |" in text
    frontier.main([*arguments[:3], "--methods", "trained", "--seeds", "2"])
    points = json.loads(out.read_text())["points"].values()
    assert [one["seed"] for one in points if one["method"] == "trained"] == [0, 1]
    # Tables that are made from rows by least squares are not finetuned.
    frontier.main([*arguments, "trained", "--trained", "least_squares"])
    points = json.loads(out.read_text())["points"].values()
    own = [one for one in points if one.get("trained") == "least_squares"]
    assert [one["method"] for one in own] == ["low_rank", "rounding", "trained"]
    assert own[0]["recall"] == own[0]["recall_before"]
    assert own[2]["bytes"] < own[2]["dense_bytes"] / 3
    monkeypatch.setattr(frontier, "measure", None)
    frontier.main(arguments)
