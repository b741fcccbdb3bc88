"""Limits of the gradients of rows: against float64, for every op, layer and layout of a collection."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_tt
import jax_tt.linen
from jax_tt import Bags, optimizers
from tests.helpers import f64, fused
from tests.optimizers.test_rules import COLUMNS, ROWS, batches, cores, gradients, rows

LIMIT = 0.03
RULE = optimizers.SGD(0.5)
WEIGHTED = Bags.from_ragged([[5, 29, 5], [], [1, 5]], [[1.0, 2.0, -1.0], [], [0.5, 3.0]])


def large(shape):
    """Gradients on both sides of the limit."""
    return jnp.asarray(np.random.default_rng(6).normal(size=shape) * LIMIT, jnp.float32)


def test_20_steps_are_those_of_the_formula(method):
    table, state = fused(rows(), RULE, max_gradient=LIMIT)
    g = gradients(COLUMNS)
    limited, values = np.clip(g, -LIMIT, LIMIT), f64(rows())
    assert 0.1 < np.mean(limited != g) < 0.9

    @jax.jit
    def step(state, ids, offsets, scale):
        def loss(state):
            options = {"combiner": "mean", "method": method, "grad_scale": scale}
            pooled, _ = jax_tt.lookup_bags(table, state, Bags(ids, offsets), **options)
            return scale * jnp.sum(pooled * jnp.float32(g))

        return jax.grad(loss)(state)

    for t, (ids, offsets) in enumerate(batches(20)):
        counts = np.diff(offsets)
        gradient = np.zeros((ROWS, COLUMNS))
        # The limit is that of the gradient of the mean, before it is divided by the number of ids.
        shares = np.repeat(limited / np.maximum(counts, 1)[:, None], counts, axis=0)
        np.add.at(gradient, ids, shares)
        values -= 0.5 * gradient
        state = step(state, ids, offsets, 2.0 ** (t % 3))
    np.testing.assert_allclose(state["embedding"], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean", "max"])
@pytest.mark.parametrize("tt", [False, True])
def test_it_is_a_limit_of_the_gradient_of_the_result(combiner, tt):
    start = cores() if tt else rows()
    state = fused(start, RULE)[1]
    weights = None if combiner == "max" else WEIGHTED.weights

    def stepped(g, **options):
        table, _ = fused(start, RULE, **options)

        def loss(state, weights):
            bags = Bags(WEIGHTED.ids, WEIGHTED.offsets, weights)
            return jnp.sum(jax_tt.lookup_bags(table, state, bags, combiner=combiner)[0] * g)

        argnums = 0 if weights is None else (0, 1)
        return jax.jit(jax.grad(loss, argnums))(state, weights)

    g = large((3, fused(start, RULE)[0].features))
    got = stepped(g, max_gradient=LIMIT)
    want = stepped(jnp.clip(g, -LIMIT, LIMIT))
    if weights is not None:
        # It is no limit of the gradient of the weights.
        want = want[0], stepped(g)[1]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_lookups_have_it_as_well():
    table, state = fused(cores(), RULE)
    limited, _ = fused(cores(), RULE, max_gradient=0.25)
    ids, g = jnp.array([[1, 2], [2, 2]]), 100.0

    def loss(state, g, table):
        return g * jnp.sum(jax_tt.lookup(table, state, ids)[0])

    @jax.jit
    def steps(state):
        return jax.grad(loss)(state, g, limited), jax.grad(loss)(state, 0.25, table)

    got, want = steps(state)
    for name in table.spec.param_names:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)


def test_steps_with_gradients_that_are_not_finite_are_still_skipped():
    table, state = fused(rows(), RULE, max_gradient=1.0)
    skips, _ = fused(rows(), RULE, max_gradient=1.0, skip_nonfinite=True)

    def loss(state, bad, table):
        return bad * jnp.sum(jax_tt.lookup_bags(table, state, jnp.array([[1, 2]]))[0])

    @jax.jit
    def steps(state, bad):
        return jax.grad(loss)(state, bad, skips), jax.grad(loss)(state, bad, table)

    for bad in (np.inf, np.nan):
        skipped, taken = (after["embedding"] for after in steps(state, bad))
        np.testing.assert_array_equal(skipped, state["embedding"])
        assert np.all(np.isfinite(f64(taken))) == np.isinf(bad)


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_tables_of_a_collection_have_limits_of_their_own(layout):
    tables = {
        "limited": jax_tt.dense_table(50, 8, optimizer=RULE, max_gradient=0.125),
        "free": jax_tt.dense_table(50, 4, optimizer=RULE),
        "plain": jax_tt.dense_table(50, 2),
    }
    features = {
        "a": jax_tt.Feature("free"),
        "b": jax_tt.Feature("limited"),
        "c": jax_tt.Feature("plain"),
        "d": jax_tt.Feature("limited", combiner="mean" if layout == "features" else "sum"),
    }
    collection = jax_tt.Collection(tables, features)
    state = jax.jit(collection.init)(jax.random.key(0))
    batch = {name: np.array([[1, 2], [2, 3]]) for name in features}
    inputs = jax_tt.extension.StepInputs(grad_scale=2.0)

    def loss(trained, g):
        arrays = collection.replaced(state, trained)
        out = jax_tt.lookup_features(collection, arrays, batch, inputs=inputs, layout=layout)[0]
        if layout == "concatenated":
            out = dict(zip(features, jnp.split(out, (4, 12, 14), axis=1), strict=True))
        return sum(jnp.sum(out[name] * g[name]) for name in features)

    g = {"a": 3.0, "b": 5.0, "c": 7.0, "d": 9.0}
    step = jax.jit(jax.grad(loss))
    got, want = (
        step(collection.trained(state), given) for given in (g, {**g, "b": 0.25, "d": 0.25})
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def total(rows: Any) -> jax.Array:
    return jnp.sum(rows)


def test_layers_have_it():
    ids = jnp.array([[1, 5], [5, 5]])
    start = jax.random.normal(jax.random.key(0), (50, 8))
    options = {
        "embedding_init": lambda key, shape, dtype: start,
        "optimizer": RULE,
        "max_gradient": 0.25,
    }
    layer = jax_tt.EmbedBag(50, 8, **options, rngs=nnx.Rngs(0))
    assert layer.max_gradient == 0.25
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    opt.update(layer, jax_tt.grad(lambda m: 100 * jnp.sum(m(ids)))(layer))
    want = f64(start)
    want[[1, 5]] -= 0.5 * 0.25 * np.array([[1], [3]])
    np.testing.assert_allclose(layer.embedding[...], want, rtol=1e-6)
    linen = jax_tt.linen.TableEmbed(jax_tt.dense_table(50, 8, **options), combiner="sum")
    variables = linen.init(jax.random.key(0), ids)
    new = jax.grad(lambda v: 100 * total(linen.apply(v, ids)))(variables)
    np.testing.assert_allclose(new["_overwrite_with_gradient"]["embedding"], want, rtol=1e-6)
    tt = jax_tt.TTEmbed(50, 8, tt_ranks=2, optimizer=RULE, max_gradient=0.25, rngs=nnx.Rngs(0))
    tt.optimizer = optimizers.Adagrad(0.1)
    assert tt.max_gradient == 0.25


def test_what_is_no_limit_is_refused():
    for bad in (0, -1.0, True, np.nan, np.inf, 1e-50, "1"):
        with pytest.raises(ValueError, match=r"max_gradient: got .*; expected a positive number"):
            jax_tt.Update(RULE, max_gradient=bad)


def test_a_table_without_an_optimizer_has_no_limit():
    match = r"max_gradient: got 1.0 for a table without an optimizer"
    with pytest.raises(ValueError, match=match):
        jax_tt.dense_table(10, 4, max_gradient=1.0)
    with pytest.raises(ValueError, match=match):
        jax_tt.TTEmbedBag(50, 8, tt_ranks=2, max_gradient=1.0, rngs=nnx.Rngs(0))
