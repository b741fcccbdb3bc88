"""`KeyedBags` reach native operations whole: results are those of a dict, and memory is linear in the ids."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
from jax_tt import Bags, Feature, KeyedBags, optimizers
from tests.conftest import native_available

pytestmark = [
    pytest.mark.skipif(not native_available(), reason="no native module"),
    pytest.mark.usefixtures("one_device"),
]

ROWS = {"a": 50, "b": 7, "c": 300}
FEATURES = {
    "first": Feature("a"),
    "second": Feature("a", combiner="mean"),
    "apart": Feature("b"),
    "weighted": Feature("c", combiner="sqrtn"),
    "again": Feature("b"),
    "positions": Feature("odd", combiner=None),
    "train": Feature("train"),
}


def tables() -> dict[str, Any]:
    rule = optimizers.RowWiseAdagrad(0.1)
    described = {name: jax_tt.dense_table(rows, 6, optimizer=rule) for name, rows in ROWS.items()}
    train = jax_tt.tt_table(20, 6, tt_ranks=2, row_factors=(4, 5), optimizer=rule)
    return described | {"odd": jax_tt.dense_table(20, 5, optimizer=rule), "train": train}


def bags_of(seed: int, sizes: tuple[int, ...], beyond: int = 0) -> dict[str, Bags]:
    rng = np.random.default_rng(seed)
    bags = {}
    for (name, feature), size in zip(FEATURES.items(), sizes, strict=True):
        lengths = rng.integers(0, 4, size)
        count = int(lengths.sum())
        ids = rng.integers(-beyond, ROWS.get(feature.table, 20) + beyond, count).astype(np.int32)
        weights = rng.normal(size=count).astype(np.float32) if name == "weighted" else None
        bags[name] = Bags.from_lengths(ids, lengths, weights)
    return bags


class Tower(nnx.Module):
    def __init__(self, stack: bool) -> None:
        self.embed = jax_tt.EmbedCollection(tables(), FEATURES, stack=stack, rngs=nnx.Rngs(0))

    def __call__(self, batch: Any) -> jax.Array:
        rows = self.embed(batch)
        return sum(jnp.sum(jnp.sin(rows[name]) * (k + 1)) for k, name in enumerate(FEATURES))


@nnx.jit
def train(model: Any, opt: Any, batch: Any) -> Any:
    loss, grads = jax_tt.value_and_grad(lambda m: m(batch))(model)
    opt.update(model, grads)
    return loss


@pytest.mark.parametrize("sizes", [(4,) * 7, (3, 5, 0, 2, 1, 4, 2)])
@pytest.mark.parametrize("stack", [False, True])
def test_layers_train_as_with_a_dict(stack, sizes):
    """Also features that do not lie beside others of their table, features of other sizes, and ids out of range."""
    found = []
    for keyed in (False, True):
        model = Tower(stack)
        opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
        losses = []
        for seed in range(3):
            bags = bags_of(seed, sizes, beyond=2)
            batch = KeyedBags.from_bags(bags, capacity=64) if keyed else bags
            losses.append(float(train(model, opt, batch)))
        counts = {name: int(model.embed.tables[name].out_of_range[...]) for name in tables()}
        found.append((losses, counts, model.embed.states()))
    (losses, counts, states), (got, got_counts, got_states) = found
    # A sequence of ragged bags has a row for every position of the batch.
    np.testing.assert_allclose(got, losses, rtol=1e-6)
    assert got_counts == counts and counts["a"] > 0
    for name in ROWS:
        jax.tree.map(np.testing.assert_array_equal, got_states[name], states[name])


def test_gradients_of_weights():
    collection = jax_tt.Collection(tables(), FEATURES)
    state, bags = collection.init(jax.random.key(0)), bags_of(0, (4,) * 7)

    def loss(weights: Any, batch: Any) -> jax.Array:
        if isinstance(batch, KeyedBags):
            batch = dataclasses.replace(batch, weights=weights)
        else:
            weighted = dataclasses.replace(batch["weighted"], weights=weights)
            batch = {**batch, "weighted": weighted}
        rows, _ = jax_tt.lookup_features(collection, state, batch)
        return jnp.sum(rows["weighted"] ** 3)

    keyed = KeyedBags.from_bags(bags)
    want = jax.grad(loss)(jnp.asarray(bags["weighted"].weights), bags)
    got = np.asarray(jax.grad(loss)(jnp.asarray(keyed.weights), keyed))
    begin = sum(len(bags[name].ids) for name in list(FEATURES)[:3])
    np.testing.assert_array_equal(got[begin : begin + len(want)], want)
    assert np.count_nonzero(got) == np.count_nonzero(want)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [0, 2, 3, 9], [-(2**31), 2, 3, 4]])
def test_offsets_that_nothing_has_checked(offsets):
    described = {name: jax_tt.dense_table(10, 4) for name in "abc"}
    collection = jax_tt.Collection(described, {name: Feature(name) for name in described})
    batch = KeyedBags(jnp.zeros(4, jnp.int32), jnp.array(offsets, jnp.int32), keys=("a", "b", "c"))
    state = collection.init(jax.random.key(0))
    with pytest.raises(
        Exception, match=r"KeyedBags.offsets\[\d\] is .*; expected offsets that never"
    ):
        jax.block_until_ready(jax_tt.lookup_features(collection, state, batch, bounds="unchecked"))


@pytest.mark.optimized
def test_memory_is_linear_in_the_ids():
    """Temporaries of a step are the rows and their gradients, and no part of the ids for every feature."""
    count, samples = 40, 64
    described = {
        f"t{k}": jax_tt.dense_table(100, 2, optimizer=optimizers.SGD(0.1)) for k in range(count)
    }
    features = {name: Feature(name) for name in described}
    ids = np.zeros(count * samples * 8, np.int32)
    lengths = np.full(count * samples, 8)
    batch = jax.tree.map(jnp.asarray, KeyedBags.from_lengths(list(features), ids, lengths))
    embed = jax_tt.EmbedCollection(described, features, rngs=nnx.Rngs(0))
    graph, state = nnx.split(embed)

    def step(state: Any, batch: Any) -> Any:
        layer = nnx.merge(graph, state)
        loss, grads = jax_tt.value_and_grad(lambda m: jnp.sum(m.concatenated(batch) ** 2))(layer)
        jax_tt.FusedOptimizer(layer, optax.sgd(0.1)).update(layer, grads)
        return loss, nnx.state(layer)

    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    rows = count * samples * 2 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * rows + 6 * ids.nbytes
