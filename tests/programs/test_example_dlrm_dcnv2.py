"""DLRM-DCNv2 of the example: multi-hot clicks, its model, and what all kinds of tables learn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("orbax.checkpoint")

from flax import nnx

from examples.dlrm import metrics, mlperf
from examples.dlrm.config import Config, parse
from examples.dlrm.create import create
from examples.dlrm.cross_model import CrossNetwork
from examples.dlrm.data_synthetic import SyntheticClicks
from examples.dlrm.learner import start
from examples.dlrm.train import open_data, train

pytestmark = pytest.mark.usefixtures("promotion_of_a_user")

TINY = Config(
    model="dcnv2",
    tables="mlperf",
    divide=20_000,
    tt_min_rows=1000,
    tt_ranks=4,
    cache=0.02,
    cache_sample=2,
    plan_ratio=3.0,
    features=8,
    bottom=(16,),
    top=(16,),
    cross_layers=2,
    cross_rank=8,
    steps=30,
    batch_size=256,
    tt_learning_rate=0.05,
    mlp_learning_rate=1e-3,
    eval_every=30,
    eval_examples=4096,
)


@pytest.fixture
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of large tables and three others."""
    some = (0, 1, 4, 13, 19)
    for name in ("SIZES", "MULTI_HOT"):
        every = getattr(mlperf, name)
        monkeypatch.setattr(mlperf, name, tuple(every[k] for k in some))


def test_sizes_are_those_of_the_benchmark_divided() -> None:
    config = parse(["--model", "dcnv2"]).config
    assert (config.features, config.cross_layers, config.cross_rank) == (128, 3, 512)
    assert (config.bottom, config.top) == ((512, 256), (1024, 1024, 512, 256))
    assert len(mlperf.SIZES) == len(config.multi_hot) == 26 and sum(config.multi_hot) == 214
    assert max(config.table_sizes) == 40_000 and min(config.table_sizes) == 1
    assert parse(["--model", "dcnv2", "--divide", "1"]).config.table_sizes == mlperf.SIZES


def test_multi_hot_clicks_follow_the_planted_probability() -> None:
    data = SyntheticClicks((2000, 900, 4), 4096, 65_536, multi_hot=(3, 1, 20))
    batches = list(data.evaluation(data.start))
    ids = np.concatenate([batch.ids for batch in batches])
    assert ids.shape == (65_536, 24)
    np.testing.assert_array_less(ids.max(axis=0), [2000] * 3 + [900] + [4] * 20)
    assert np.mean(ids[:, 0] == ids[:, 1]) < 0.5  # drawn independently
    logits = np.concatenate([data.best_scores(batch) for batch in batches])
    labels = np.concatenate([batch.label for batch in batches])
    p = 1 / (1 + np.exp(-logits))
    assert abs(np.mean(labels - p)) < 4 * np.sqrt(np.mean(p * (1 - p)) / len(p))
    assert 0.7 < metrics.auc(logits, labels) < 0.9
    with pytest.raises(
        ValueError, match="multi_hot: got 1 numbers, expected one for each of the 3"
    ):
        SyntheticClicks((2000, 900, 4), 4096, 0, multi_hot=(3,))


def test_cross_network_is_its_formula() -> None:
    network = CrossNetwork(6, layers=2, rank=3, rngs=nnx.Rngs(0))
    first = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    x = first
    for down, up in zip(network.down, network.up, strict=True):
        up.bias[...] += 0.5
        v, w, b = (np.asarray(a[...]) for a in (down.kernel, up.kernel, up.bias))
        x = first * (x @ v @ w + b) + x
    np.testing.assert_allclose(network(first), x, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("few_features")
def test_small_tables_learn() -> None:
    dense = 4 * TINY.features * sum(TINY.table_sizes)
    results = {variant: train(TINY, variant) for variant in ("tt_fused", "mixed_fused")}
    for result in results.values():
        assert result.best_auc is not None and 0.65 < result.auc < result.best_auc
    assert results["tt_fused"].table_bytes < dense / 4
    assert results["mixed_fused"].table_bytes < 1.02 * dense / 3
    assert results["tt_fused"].hit_rate is not None


@pytest.mark.usefixtures("few_features")
def test_rows_of_large_tables_are_widened() -> None:
    """Their bags times the one matrix; the bags of small tables are as wide as the model."""
    config = dataclasses.replace(TINY, tt_features=4)
    model, _ = create(config, "narrow_fused", config.table_sizes)
    matrix = np.asarray(model.tables.widening.kernel[...])
    assert matrix.shape == (4, 8)
    collection = model.tables.collection
    ids = np.zeros((3, sum(config.multi_hot)), np.int32)
    vectors = model.tables(ids)
    places = zip(model.tables.places, config.table_sizes, config.multi_hot, strict=True)
    for k, (place, rows, hot) in enumerate(
        sorted(places, key=lambda of_feature: of_feature[1] >= config.tt_min_rows)
    ):
        large = rows >= config.tt_min_rows
        table = collection.tables[place.table]
        assert table.table.features == (4 if large else 8)
        row = np.asarray(table(np.array([place.first])))[0]
        expected = hot * row @ matrix if large else hot * row
        np.testing.assert_allclose(vectors[0, k], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("few_features")
def test_matrix_is_trained_as_the_mlps_are() -> None:
    """With optax, which labels the parameters by their names."""
    config = dataclasses.replace(TINY, tt_features=4, learning_rate=0.0, tt_learning_rate=0.0)
    data = open_data(config)
    learner, values = start(config, "tt_optax", data)
    before = learner.merge(values)[0].tables.widening.kernel[...].copy()
    values, _ = learner.step(values, next(data.stream(data.start))[0])
    assert not np.array_equal(before, learner.merge(values)[0].tables.widening.kernel[...])


def test_bags_are_sums_of_rows() -> None:
    """A vector of several ids is the sum of their rows, in a table of its own and in a shared one."""
    config = dataclasses.replace(TINY, cache=0.0)
    model, _ = create(config, "tt_fused", config.table_sizes)
    rng = np.random.default_rng(0)
    columns = [
        rng.integers(0, rows, (4, hot))
        for rows, hot in zip(config.table_sizes, config.multi_hot, strict=True)
    ]
    ids = np.concatenate(columns, axis=1).astype(np.int32)

    @nnx.jit
    def rows_of(tables: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        every = tables.collection.tables.items()
        return tables(ids), {name: table.attend(jnp.eye(8)).T for name, table in every}

    vectors, rows_of_tables = rows_of(model.tables)
    assert vectors.shape == (4, 26, 8)
    first = 0
    for t, (rows, ids) in enumerate(zip(config.table_sizes, columns, strict=True)):
        large = rows >= config.tt_min_rows
        name = "shared" if large else f"table_{t}"
        whole = np.asarray(rows_of_tables[name])
        table = whole[first : first + rows] if large else whole
        first += rows if large else 0
        np.testing.assert_allclose(vectors[:, t], table[ids].sum(1), rtol=1e-4, atol=1e-5)
